"""The few things this project asks of Ray: a cluster, reserved slots, processes that are gone."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from expertmesh.actors.process import own_cores
from expertmesh.cluster.membership import Member
from expertmesh.cluster.settings import OBJECT_STORE_BYTES, ClusterSettings
from expertmesh.cluster.topology import Node

# Slots of a local cluster beyond the actors' own: the front door's processes, and room to scale.
SPARE_SLOTS = 20
START_ATTEMPTS = 3


class RayUnavailable(RuntimeError):
    """There is no Ray cluster to work with."""


def connect(settings: ClusterSettings) -> bool:
    """Connects to Ray, starting a local cluster if none is named. True if this call started it.

    Raises RayUnavailable.
    """
    if ray.is_initialized():
        return False
    common: dict[str, Any] = {
        "namespace": settings.namespace,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    if settings.ray_address is not None:
        try:
            ray.init(address=settings.ray_address, **common)
        except Exception as error:  # Ray raises bare ones
            raise RayUnavailable(f"no Ray cluster at {settings.ray_address}: {error}") from error
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers niceness 15: any other load on the machine would starve the model.
    os.environ.setdefault("RAY_worker_niceness", "0")
    slots = settings.actors * settings.cpus_per_actor + SPARE_SLOTS
    for attempt in range(START_ATTEMPTS):
        try:
            ray.init(
                address="local",  # never a cluster that happens to run here
                num_cpus=max(own_cores(), int(slots) + 1),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                **common,
            )
            return True
        except Exception as error:
            # Its processes have 15 and 30 s to come up, fixed inside Ray; a busy machine needs a
            # second try, with the files now in memory.
            ray.shutdown()
            if attempt == START_ATTEMPTS - 1:
                raise RayUnavailable(f"Ray did not start: {error}") from error
    raise AssertionError("unreachable")


def nodes() -> list[Node]:
    """Live nodes. Ray only knows slots; they are taken for cores on other machines than this."""
    here = ray.get_runtime_context().get_node_id()
    found = []
    for entry in ray.nodes():  # type: ignore[no-untyped-call]
        if not entry["Alive"]:
            continue
        resources = entry["Resources"]
        cores = own_cores() if entry["NodeID"] == here else int(resources.get("CPU", 1))
        found.append(
            Node(
                entry["NodeID"],
                entry["NodeManagerAddress"],
                entry["NodeManagerHostname"],
                cores,
                resources.get("GPU", 0.0),
            )
        )
    return found


def reserve(bundles: Sequence[dict[str, float]], strategy: str, timeout_s: float) -> Any:
    """A placement group that is ready. Raises TimeoutError when there is no room in time."""
    group = placement_group(list(bundles), strategy=strategy)
    if not group.wait(timeout_s):
        remove_placement_group(group)
        resources = ray.available_resources()  # type: ignore[no-untyped-call]
        asked = {name for bundle in bundles for name in bundle} | {"CPU", "GPU"}
        free = {k: v for k, v in resources.items() if k in asked}
        kinds = Counter(str(bundle) for bundle in bundles)
        wanted = " and ".join(f"{count} bundles of {kind}" for kind, count in kinds.items())
        raise TimeoutError(
            f"Ray has not reserved {wanted} ({strategy}) within {timeout_s:g} s; free now: {free}"
        )
    return group


def release(group: Any) -> None:
    with contextlib.suppress(RayError):
        remove_placement_group(group)


def reap(members: Sequence[tuple[Member, str]], timeout_s: float = 10.0) -> list[Member]:
    """Waits until the processes are gone, killing what is left; returns those that remain.

    Ray's kill asks the process to exit, which a stopped one never does. members: with node ids.
    """
    here = ray.get_runtime_context().get_node_id()
    remaining = []
    for node in {node for _, node in members}:
        pids = [member.pid for member, home in members if home == node]
        if node == here:
            left = reap_pids(pids, timeout_s)
        else:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(reap_pids).options(num_cpus=0, scheduling_strategy=strategy)
            try:
                left = ray.get(task.remote(pids, timeout_s), timeout=timeout_s + 10)
            except RayError:
                left = []  # the node is gone, and its processes with it
        remaining += [member for member, home in members if home == node and member.pid in left]
    return remaining


def reap_pids(pids: Sequence[int], timeout_s: float) -> list[int]:
    """Of this machine's processes `pids`, those that survive even SIGKILL for `timeout_s`."""
    grace = time.monotonic() + min(1.0, timeout_s / 2)
    end = time.monotonic() + timeout_s
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if _is_ray_worker(pid)]
        if time.monotonic() > grace:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left


def _is_ray_worker(pid: int) -> bool:
    """Also guards against a number that already belongs to another process."""
    try:
        name, rest = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)
    except OSError:
        return False
    return "(ray::" in name and rest.split()[0] not in "ZX"
