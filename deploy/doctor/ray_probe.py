"""Does a Ray cluster answer, and with what: asked as `expertmesh serve --address` would, in a
process of its own, because Ray waits for minutes and exits the process it cannot connect."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from expertmesh.deploy.doctor.findings import Finding, judged
from expertmesh.deploy.exit_codes import Refused
from expertmesh.deploy.preflight import check_cluster

SECTION = "Ray cluster"
PROBE_SECONDS = 60.0
MARK = "NODES "


def check_ray(address: str) -> Iterator[Finding]:
    try:
        check_cluster(address)
    except Refused as refused:
        yield Finding(SECTION, address, "fail", refused.message, refused.hint)
        return
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, address],
            capture_output=True, text=True, timeout=PROBE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        yield _no_answer(address, f"no answer within {PROBE_SECONDS:g} s")
        return
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        yield _no_answer(address, said[-1][:300] if said else f"exit code {done.returncode}")
        return
    yield from nodes(address, json.loads(lines[0].removeprefix(MARK)))


def nodes(address: str, found: list[dict[str, Any]]) -> Iterator[Finding]:
    """found: entries of ray.nodes()."""
    alive = [node for node in found if node["Alive"]]
    yield judged(
        SECTION, address, f"{len(alive)} nodes alive, {len(found) - len(alive)} dead", bool(alive),
        "start its head again", "fail",
    )  # fmt: skip
    for node in alive:
        resources = node["Resources"]
        parts = [f"{resources.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU")]
        parts.append(f"{resources.get('memory', 0) / 1e9:.1f} GB")
        yield Finding(SECTION, node["NodeManagerHostname"], "ok", ", ".join(parts))


def _no_answer(address: str, why: str) -> Finding:
    return Finding(
        SECTION, address, "fail", why,
        "run this on a node of the cluster, with the versions of Ray and Python of its head",
    )  # fmt: skip


def probe(address: str) -> None:
    """Prints the nodes."""
    import ray

    ray.init(address=address, log_to_driver=False, namespace="doctor")
    print(MARK + json.dumps(ray.nodes(), default=str))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    probe(sys.argv[1])
