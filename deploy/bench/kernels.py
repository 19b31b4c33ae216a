"""Floors of the kernels at K3's shapes, and how near this machine's GPU comes to them.

A floor is what an H200 needs at least: every byte once at its memory's rate, or every operation at
its peak (kernels/work.py). Nothing but the cases says what an operator moves and computes.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec
import torch

from expertmesh.kernels.cases import Case, Make
from expertmesh.kernels.registry import Kernels, load_kernels, resolve
from expertmesh.kernels.work import H200

# Written before every timed call: more than an L2 cache holds, so that nothing is found in it, and
# long enough (220 us) for the host to ask for all kernels of a call before the first one starts.
FLUSH_BYTES = 1 << 30
LEAST_CALLS, MOST_CALLS, CALLS_SECONDS = 10, 200, 0.1


class Measured(msgspec.Struct, frozen=True):
    """by: the backend that "auto" takes here. us: median of a call, cold caches. error: why there
    is none."""

    by: str
    us: float | None
    error: str = ""


class Floor(msgspec.Struct, frozen=True):
    """One case. us: the floor. bound: "memory" or "compute". ratio: measured / floor."""

    operator: str
    phase: str
    size: str
    bytes: int
    flops: int
    unit: str
    us: float
    bound: str
    measured: Measured | None
    ratio: float | None


def floors(cases: Sequence[Case], on_gpu: bool) -> Iterator[Floor]:
    """Of each case, measured where `on_gpu`."""
    kernels = load_kernels("auto", "cuda") if on_gpu else None
    backends = resolve("auto", "cuda") if on_gpu else {}
    for case in cases:
        us = H200.floor_us(case.work)
        found = None if kernels is None else measure(case, kernels, backends[case.operator])
        yield Floor(
            case.operator, case.phase, case.size, case.work.bytes, case.work.flops, case.work.unit,
            us, H200.bound(case.work), found,
            found.us / us if found is not None and found.us is not None else None,
        )  # fmt: skip


@torch.inference_mode()
def measure(case: Case, kernels: Kernels, backend: str) -> Measured:
    """On the current GPU. A case that fails is a result too: the others go on."""
    operator = getattr(kernels, case.operator)
    try:
        torch.cuda.empty_cache()  # what the case before has left, whose operands are gone by now
        arguments = case.arguments(Make("cuda"))
        return Measured(backend, median_us(lambda: operator(*arguments)))
    except Exception as error:  # out of memory, a kernel that does not start: whatever it is
        return Measured(backend, None, f"{type(error).__name__}: {error}".splitlines()[0])


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of one call on the device, between events, with cold caches."""
    call()  # compiles
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    first = _timed(call, flush, 3)
    wanted = CALLS_SECONDS / max(1e-6, statistics.median(first) * 1e-3)
    times = _timed(call, flush, max(LEAST_CALLS, min(MOST_CALLS, int(wanted))))
    return statistics.median(times) * 1e3


def _timed(call: Callable[[], object], flush: torch.Tensor, count: int) -> list[float]:
    """Milliseconds of each."""
    pairs = []
    for _ in range(count):
        began, ended = _event(), _event()
        flush.zero_()
        began.record()
        call()
        ended.record()
        pairs.append((began, ended))
    torch.cuda.synchronize()
    return [float(began.elapsed_time(ended)) for began, ended in pairs]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
