"""What a node of a Ray cluster says of itself, and what of it an operator should know."""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import psutil

# Ray keeps its object store in /dev/shm; a container has 64 MB of it unless told otherwise, and
# NCCL puts its own buffers there.
LEAST_SHM_BYTES = 256 << 20
SHM = "/dev/shm"


class NodeFacts(NamedTuple):
    """shm_bytes: size of /dev/shm, 0 where there is none. has_model: None when not asked."""

    address: str
    hostname: str
    ray: str
    python: str
    expertmesh: str
    shm_bytes: int
    has_model: bool | None


def look(address: str, model: str | None) -> NodeFacts:
    """Run on the node itself, whose address is `address`."""
    return NodeFacts(
        address,
        platform.node(),
        version("ray"),
        platform.python_version(),
        _own_version(),
        shm_size(),
        None if model is None else (Path(model) / "config.json").is_file(),
    )


def shm_size() -> int:
    try:
        return int(psutil.disk_usage(SHM).total)
    except OSError:
        return 0


def warnings(facts: Sequence[NodeFacts]) -> list[str]:
    """One line for each thing that will hurt later."""
    found = []
    for what in ("ray", "python", "expertmesh"):
        found += _odd_ones(facts, what)
    for node in facts:
        who = f"{node.address} ({node.hostname})"
        if 0 < node.shm_bytes < LEAST_SHM_BYTES:
            found.append(
                f"{who}: {SHM} has {node.shm_bytes >> 20} MB, at least {LEAST_SHM_BYTES >> 20} MB "
                "are wanted: start the container with --shm-size, or mount a larger tmpfs"
            )
        if node.address.startswith("127."):
            found.append(
                f"{who} knows itself only by a loopback address: give `ray start` its "
                "--node-ip-address"
            )
    return found


def _odd_ones(facts: Sequence[NodeFacts], what: str) -> list[str]:
    """Nodes whose version is another than most have."""
    counts = Counter(getattr(node, what) for node in facts)
    if len(counts) < 2:
        return []
    usual = counts.most_common(1)[0][0]
    return [
        f"{node.address} ({node.hostname}) has {what} {getattr(node, what)}, most have {usual}"
        for node in facts
        if getattr(node, what) != usual
    ]


def _own_version() -> str:
    try:
        return version("expertmesh")
    except PackageNotFoundError:
        return "none"
