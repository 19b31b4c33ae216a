"""What a cluster file says that Ray's schema accepts and that still cannot work.

Most of it ends, with `ray up` alone, in a cluster of one node and a line in a log on the head.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from expertmesh.deploy.hosts.findings import Finding
from expertmesh.deploy.hosts.versions import check_command, check_image

Config = Mapping[str, Any]

# Reserved for documentation (RFC 5737): what examples are written with, and no host ever has.
_EXAMPLES = [ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")]
_PORT = re.compile(r"--port[= ](\d+)")
_ADDRESS = re.compile(r"--address[= ]\S*RAY_HEAD_IP\}?:(\d+)")
_NO_AUTOSCALER_V2 = "RAY_enable_autoscaler_v2=0"
_TOKEN_MODE = "RAY_AUTH_MODE=token"
HEAD_COMMANDS, WORKER_COMMANDS = "head_start_ray_commands", "worker_start_ray_commands"


def check_meaning(config: Config) -> list[Finding]:
    found = [
        *_needed(config, "max_workers", "is missing: Ray would take 2, whatever else is asked for"),
        *_needed(config, "auth", "is missing: Ray does not know whom to log in as"),
        *_needed(config.get("auth") or {}, "auth.ssh_user", "is missing"),
        *_commands(config),
        *_files(config),
        *_images(config),
    ]
    local = config["provider"]["type"] == "local"
    return found + list(_local(config) if local else _cloud(config))


def _needed(config: Config, key: str, why: str) -> Iterator[Finding]:
    if config.get(key.rpartition(".")[2]) is None:
        yield Finding(key, why)


# --- hosts that are there already -----------------------------------------------------------------


def _local(config: Config) -> Iterator[Finding]:
    provider = config["provider"]
    if "coordinator_address" in provider:
        return
    yield from _needed(provider, "provider.head_ip", "is missing")
    yield from _needed(provider, "provider.worker_ips", "is missing; [] for a head alone")
    for key in ("available_node_types", "head_node_type"):
        if key in config:
            yield Finding(key, "is not for the local provider, whose hosts are all of one type")
    head, workers = provider.get("head_ip"), provider.get("worker_ips") or []
    for address, count in Counter(workers).items():
        if count > 1:
            yield Finding("provider.worker_ips", f"{address} is there {count} times")
    yield from _examples(head, workers)
    if head in workers:
        yield Finding("provider.worker_ips", f"{head} is the head_ip, which is no worker")
    most = config.get("max_workers")
    if most is not None and most != len(workers):
        fate = "never start" if most < len(workers) else "do not exist"
        yield Finding(
            "max_workers",
            f"is {most} with {len(workers)} worker_ips: {abs(most - len(workers))} would {fate}",
        )
    if workers and not any(_NO_AUTOSCALER_V2 in line for line in config.get(HEAD_COMMANDS) or []):
        # Ray 2.60: its second autoscaler takes the head for one of the workers it has to start.
        yield Finding(
            HEAD_COMMANDS,
            f"`ray start --head` needs {_NO_AUTOSCALER_V2} before it with the local provider, or "
            "the last host is never started",
        )


def _examples(head: object, workers: list[Any]) -> Iterator[Finding]:
    named = [("provider.head_ip", head), *(("provider.worker_ips", one) for one in workers)]
    for key, address in named:
        if isinstance(address, str) and _of_an_example(address):
            yield Finding(key, f"{address} is an example's address: put your host's here", True)


def _of_an_example(address: str) -> bool:
    try:
        found = ip_address(address)
    except ValueError:  # a name
        return False
    return any(found in net for net in _EXAMPLES)


# --- hosts that a cloud makes ---------------------------------------------------------------------


def _cloud(config: Config) -> Iterator[Finding]:
    if config["provider"]["type"] in ("aws", "gcp"):
        yield from _needed(config["provider"], "provider.region", "is missing")
    yield from _needed(config, "available_node_types", "is missing: Ray would start its defaults")
    yield from _needed(config, "head_node_type", "is missing: one of available_node_types")
    types = config.get("available_node_types") or {}
    head = config.get("head_node_type")
    if types and head is not None and head not in types:
        known = ", ".join(types)
        yield Finding("head_node_type", f"{head} is none of available_node_types ({known})")
    for name, kind in types.items():
        yield from _node_type(f"available_node_types.{name}", kind, config, name == head)
    least = sum(kind.get("min_workers", 0) for kind in types.values())
    most = config.get("max_workers")
    if most is not None and least > most:
        yield Finding("max_workers", f"is {most}, the node types' min_workers add up to {least}")


def _node_type(key: str, kind: Config, config: Config, head: bool) -> Iterator[Finding]:
    least, most = kind.get("min_workers", 0), kind.get("max_workers")
    if least < 0:
        yield Finding(f"{key}.min_workers", f"is {least}, less than 0")
    if most is not None and least > most:
        yield Finding(f"{key}.min_workers", f"is {least}, more than max_workers {most}")
    if head:
        if least or most:
            yield Finding(f"{key}.min_workers", "would start workers of the head's type", True)
    elif most is None:
        yield Finding(f"{key}.max_workers", "is missing: the global max_workers would count alone")
    elif most > (total := config.get("max_workers") or 0):
        yield Finding(f"{key}.max_workers", f"is {most}, more than all together may be ({total})")
    if config["provider"]["type"] == "aws":
        yield from _needed(kind["node_config"], f"{key}.node_config.InstanceType", "is missing")
        if set(str(kind["node_config"].get("ImageId", "ami-1"))) <= set("ami-0"):
            yield Finding(f"{key}.node_config.ImageId", "is still the example's")


# --- what hosts run -------------------------------------------------------------------------------


def _commands(config: Config) -> Iterator[Finding]:
    heads, workers = config.get(HEAD_COMMANDS) or [], config.get(WORKER_COMMANDS) or []
    for key, lines in ((HEAD_COMMANDS, heads), (WORKER_COMMANDS, workers)):
        if not lines:
            yield Finding(key, "is missing: Ray's defaults know no token and no limits of ours")
        elif not any(re.search(r"\bray stop\b", line) for line in lines):
            yield Finding(key, "has no `ray stop`: a second `ray up` would find Ray running")
    head, worker = " ".join(heads), " ".join(workers)
    if heads:
        yield from _missing(HEAD_COMMANDS, head, ("ray start", "--head", "--autoscaling-config"))
    if workers:
        yield from _missing(WORKER_COMMANDS, worker, ("ray start", "RAY_HEAD_IP"))
    port, asked = _PORT.search(head), _ADDRESS.search(worker)
    if asked and asked[1] != (port[1] if port else "6379"):
        yield Finding(WORKER_COMMANDS, f"asks port {asked[1]}, the head listens on another")
    if heads and workers and (_TOKEN_MODE in head) != (_TOKEN_MODE in worker):
        without = WORKER_COMMANDS if _TOKEN_MODE in head else HEAD_COMMANDS
        yield Finding(without, f"has no {_TOKEN_MODE}, the other side has: workers never join")
    if _TOKEN_MODE in head and not any(".ray" in path for path in config.get("file_mounts") or {}):
        yield Finding("file_mounts", f"has no ~/.ray/auth_token, which {_TOKEN_MODE} needs")
    if heads and _TOKEN_MODE not in head:
        message = f"without {_TOKEN_MODE} anybody who reaches the head runs code on it"
        yield Finding(HEAD_COMMANDS, message, warning=True)
    for key in ("setup_commands", "head_setup_commands", "worker_setup_commands"):
        for line in config.get(key) or []:
            yield from check_command(key, line)


def _missing(key: str, text: str, words: tuple[str, ...]) -> Iterator[Finding]:
    for word in words:
        if word not in text:
            yield Finding(key, f"has no {word}")


def _files(config: Config) -> Iterator[Finding]:
    """Paths on this machine."""
    for remote, source in (config.get("file_mounts") or {}).items():
        if not Path(str(source)).expanduser().exists():
            yield Finding(f"file_mounts.{remote}", f"{source} does not exist here")
    key = (config.get("auth") or {}).get("ssh_private_key")
    if key is not None and not Path(key).expanduser().is_file():
        yield Finding("auth.ssh_private_key", f"{key} does not exist here")
    if key is None and config["provider"]["type"] == "local":
        yield Finding("auth.ssh_private_key", "is missing: the head could not reach the workers")


def _images(config: Config) -> Iterator[Finding]:
    docker = config.get("docker") or {}
    images = {f"docker.{key}": docker[key] for key in docker if key.endswith("image")}
    for name, kind in (config.get("available_node_types") or {}).items():
        own = (kind.get("docker") or {}).get("worker_image")
        if own:
            images[f"available_node_types.{name}.docker.worker_image"] = own
    if docker and not images:
        yield Finding("docker.image", "is missing")
    if docker and not docker.get("container_name"):
        yield Finding("docker.container_name", "is missing: nothing would run in the container")
    for option in docker.get("run_options") or []:
        if option.startswith("--net"):
            why = "Ray adds --net=host, and Docker refuses two"
            yield Finding("docker.run_options", f"{option}: {why}")
    for key, image in images.items():
        yield from check_image(key, image)
