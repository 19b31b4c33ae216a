"""`expertmesh cluster wait`: expected nodes against joined ones, and a look at each."""

import logging
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from expertmesh.deploy import preflight
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.hosts.probe import NodeFacts, look, warnings
from expertmesh.deploy.hosts.token import offer_token

LOOK_SECONDS = 0.5
PROBE_SECONDS = 60.0
LOGS = "/tmp/ray/session_latest/logs"


class Joined(NamedTuple):
    id: str
    address: str
    hostname: str
    head: bool

    def __str__(self) -> str:
        return f"{self.address} ({self.hostname}{', head' if self.head else ''})"


def wait_for_nodes(nodes: int, timeout: float, address: str, model: Path | None) -> None:
    """Returns when so many have joined. Raises Refused, within about `timeout` seconds."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    end = time.monotonic() + timeout
    offer_token(os.environ)
    ray = _connected(address, end)
    try:
        joined = _wait(console, ray, nodes, end)
        if len(joined) < nodes:
            raise Refused(
                ExitCode.LAUNCH,
                f"{len(joined)} of {nodes} nodes have joined within {timeout:g} s: "
                f"{', '.join(map(str, joined))}",
                f"on the head, {LOGS}/monitor.* says what became of the others; on a worker, "
                "try its start command by hand",
            )
        facts = _probe(console, ray, joined, None if model is None else str(model.absolute()))
        for line in warnings(facts):
            console.print(f"[yellow]warning[/]: {line}")
        blind = [f"{node.address} ({node.hostname})" for node in facts if node.has_model is False]
        if blind:
            raise Refused(
                ExitCode.NO_MODEL,
                f"no checkpoint at {model} on {', '.join(blind)}",
                "copy it there, or mount the same file system at the same path on every node",
            )
        console.print(f"[bold green]{len(joined)} nodes[/] have joined")
    finally:
        ray.shutdown()


def _connected(address: str, end: float) -> Any:
    """The ray module, connected. Ray itself would try for minutes."""
    import ray

    while True:
        try:
            preflight.check_cluster(address)
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR,
                namespace="expertmesh-cluster",
            )  # fmt: skip
            return ray
        except Refused as refusal:
            last = refusal
        except ConnectionError as error:
            last = Refused(ExitCode.UNREACHABLE, f"no Ray cluster at {address}: {error}")
        except Exception as error:  # a wrong token, another version: time will not mend it
            raise Refused(
                ExitCode.UNREACHABLE, f"Ray at {address} turns us away: {error}"
            ) from error
        if time.monotonic() > end:
            raise Refused(ExitCode.UNREACHABLE, last.message, last.hint)
        time.sleep(LOOK_SECONDS)


def _wait(console: Console, ray: Any, nodes: int, end: float) -> list[Joined]:
    told: set[str] = set()
    while True:
        joined = [
            Joined(
                node["NodeID"],
                node["NodeManagerAddress"],
                node["NodeManagerHostname"],
                "node:__internal_head__" in node["Resources"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        for node in joined:
            if node.id not in told:
                told.add(node.id)
                console.print(f"  joined    {node}")
        if len(joined) >= nodes or time.monotonic() > end:
            return sorted(joined, key=lambda node: (not node.head, node.address))
        time.sleep(LOOK_SECONDS)


def _probe(console: Console, ray: Any, joined: list[Joined], model: str | None) -> list[NodeFacts]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = {
        ray.remote(look)
        .options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        .remote(node.address, model): node
        for node in joined
    }
    done, late = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_SECONDS)
    facts = []
    for call in done:
        try:
            facts.append(NodeFacts(*ray.get(call)))
        except Exception as error:  # the program is not installed there, the node has gone, ...
            line = str(error).strip().splitlines()[-1]
            console.print(f"[yellow]warning[/]: {asked[call]} could not be looked at: {line}")
    for call in late:
        console.print(f"[yellow]warning[/]: {asked[call]} runs nothing within {PROBE_SECONDS:g} s")
    return facts
