"""`expertmesh scale`: asks a running server for another number of actors, and shows the answer."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from expertmesh.deploy.exit_codes import ExitCode, Refused

TOKEN = "EXPERTMESH_ADMIN_TOKEN"
ANSWER_SECONDS = 60.0


def scale(
    url: str, experts: str | None, attention: str | None, dry_run: bool, as_json: bool
) -> None:
    """Prints what will be. Without a wish, what there is. Raises Refused."""
    if experts is None and attention is None:
        _show_status(_ask(url, "/mesh"), as_json)
        return
    wish = {"experts": experts, "attention": attention, "dry_run": dry_run}
    body = {field: value for field, value in wish.items() if value is not None}
    _show_change(_ask(url, "/mesh/scale", body), as_json)


def _ask(url: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if token := os.environ.get(TOKEN, "").strip():
        headers["authorization"] = f"Bearer {token}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url.rstrip("/") + path, data, headers)
        # No proxy of the environment: it would be asked for this host's own loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=ANSWER_SECONDS) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise _refusal(error.code, error.read(10_000)) from None
    except ValueError as error:  # not a URL, or not JSON
        raise Refused(ExitCode.USAGE, f"--url {url}: {error}") from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise Refused(
            ExitCode.UNREACHABLE, f"no server answers at {url}: {reason}", "check --url"
        ) from None
    if not isinstance(answer, dict):
        raise Refused(ExitCode.UNREACHABLE, f"{url} does not answer like an ExpertMesh server")
    return answer


def _refusal(status: int, body: bytes) -> Refused:
    """The server's own words, with the option that they are about."""
    try:
        error = json.loads(body)["error"]
        message, field = str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError):
        message, field = body[:200].decode("utf-8", "replace") or f"HTTP {status}", None
    if status == 400:
        option = f"--{field}: " if field in ("experts", "attention") else ""
        return Refused(ExitCode.USAGE, option + message.removeprefix(f"{field}: "))
    hints = {401: f"set {TOKEN} to the server's token", 403: f"run it there, or set {TOKEN}"}
    return Refused(ExitCode.UNREACHABLE, message, hints.get(status, ""))


def _show_change(answer: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(answer))
        return
    table = Table("pool", "from", "to", title="dry run" if answer["dry_run"] else None)
    for pool in ("attention", "experts"):
        table.add_row(pool, str(answer[pool]["from"]), str(answer[pool]["to"]))
    Console().print(table)
    if not answer["dry_run"]:
        print("under way; `expertmesh scale` without a wish shows how far it is")


def _show_status(status: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(status))
        return
    console = Console()
    reason = f": {status['reason']}" if status["reason"] else ""
    console.print(f"{status['state']}{reason}, epoch {status['epoch']}", markup=False)
    table = Table("seat", "actor", "pid", "host", "experts per layer", "")
    for member in [*status["attention"], *status["experts"]]:
        table.add_row(
            member["seat"],
            member["actor"],
            str(member["pid"]),
            member["host"],
            str(member.get("experts_per_layer", "")),
            "leaving" if member["leaving"] else "",
        )
    console.print(table)
    wanted = status["desired"]
    console.print(f"wanted: {wanted['attention']} attention, {wanted['experts']} experts")
