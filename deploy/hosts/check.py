"""`expertmesh cluster check`: all that can be known of a cluster file before `ray up`."""

import contextlib
import io
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.hosts.findings import Finding
from expertmesh.deploy.hosts.schema import check_schema
from expertmesh.deploy.hosts.semantics import check_meaning

SSH_PORT, REACH_SECONDS = 22, 3.0


def check_file(file: Path, reach: bool = False) -> None:
    """Prints what is found. Raises Refused when it is more than warnings."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    config = read(file)
    found = findings(config)
    if reach:
        found += list(check_reach(config))
    for one in found:
        style = "[yellow]warning[/]" if one.warning else "[red]wrong[/]"
        console.print(f"{style}: ", end="")
        console.print(str(one), markup=False)
    wrong = [one for one in found if not one.warning]
    if wrong:
        count = f"{len(wrong)} thing{'s' if len(wrong) > 1 else ''}"
        raise Refused(ExitCode.USAGE, f"{file}: {count} to mend, first {wrong[0]}")
    console.print(f"[bold green]{file}[/] is a cluster file that `ray up` can use")


def read(file: Path) -> dict[str, Any]:
    """Raises Refused."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Refused(ExitCode.USAGE, f"{file}: {error}") from error
    if not isinstance(config, dict):
        raise Refused(ExitCode.USAGE, f"{file}: must be a mapping of keys")
    return config


def findings(config: dict[str, Any]) -> list[Finding]:
    """By our rules and by Ray's. What breaks the schema has no further meaning."""
    found = list(check_schema(config))
    if any(not one.warning for one in found):
        return found
    found += check_meaning(config)
    if any(not one.warning for one in found):
        return found
    return found + list(_ask_ray(config))


def _ask_ray(config: dict[str, Any]) -> Iterator[Finding]:
    """Ray's own preparation and validation, which say less, but know more providers."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    logging.getLogger("ray.autoscaler").setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            validate_config(prepare_config(config))
    except (Exception, SystemExit) as error:
        yield Finding("(Ray)", str(error).strip().splitlines()[0] if str(error) else repr(error))


def check_reach(config: dict[str, Any]) -> Iterator[Finding]:
    """Whether ssh answers on hosts that the file names. The head must reach the workers, which
    this machine may not, so that is a warning."""
    provider = config.get("provider", {})
    head = provider.get("external_head_ip") or provider.get("head_ip")
    hosts = [("provider.head_ip", head)] if head else []
    hosts += [
        (f"provider.worker_ips[{i}]", ip) for i, ip in enumerate(provider.get("worker_ips") or [])
    ]
    for key, host in hosts:
        try:
            socket.create_connection((host, SSH_PORT), REACH_SECONDS).close()
        except OSError as error:
            message = f"{host} does not answer on port {SSH_PORT}: {error}"
            yield Finding(key, message, warning=key != "provider.head_ip")
