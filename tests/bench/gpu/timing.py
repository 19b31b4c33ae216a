"""Medians of every case: its Triton kernel, and plain torch on the same inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from expertmesh.kernels.cases import Case
from expertmesh.kernels.launch import recording
from expertmesh.kernels.work import H200
from tests.bench.gpu.operators import implementation
from tests.bench.gpu.plain import plain_torch
from tests.bench.gpu.pool import NO_GRAPH
from tests.bench.gpu.rotation import copies_of
from tests.bench.gpu.timers import Timer

# A baseline slower than this is timed once: repeating it would eat the time of the others.
SLOW_US = 3e5


def time_kernel(case: Case, device: torch.device, timer: Timer, cache_bytes: int) -> dict[str, Any]:
    """`call`: launched from Python each time. `graph`: the device's time alone."""
    copies = copies_of(case.arguments, case.work.bytes, device, cache_bytes)
    triton = implementation(case.operator, "triton")
    with recording() as launches:
        triton(*copies[0])
    calls = [partial(triton, *args) for args in copies]
    return {
        "operator": case.operator,
        "phase": case.phase,
        "size": case.size,
        "bytes": case.work.bytes,
        "flops": case.work.flops,
        "unit": case.work.unit,
        "floor_us": H200.floor_us(case.work),
        "bound": H200.bound(case.work),
        "copies": len(copies),
        "kernels": [launch.name for launch in launches],
        **_times(calls, timer),
    }


def time_baseline(
    case: Case, device: torch.device, timer: Timer, cache_bytes: int
) -> dict[str, Any]:
    name, function = plain_torch(case.operator)
    copies = copies_of(case.arguments, case.work.bytes, device, cache_bytes)
    calls = [function(*args) for args in copies]
    once = timer.once_us(calls[0])
    if once > SLOW_US:
        return {"what": name, "call": {"median_us": once, "repeated": False}}
    return {"what": name, **_times(calls, timer)}


def _times(calls: list[Callable[[], Any]], timer: Timer) -> dict[str, Any]:
    times: dict[str, Any] = {"call": timer.calls_us(calls)}
    try:
        times["graph"] = timer.graph_us(calls)
    except RuntimeError as error:
        times[NO_GRAPH] = str(error).splitlines()[0]
    return times
