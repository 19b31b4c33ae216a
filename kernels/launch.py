"""Launching Triton kernels: one door for all of them.

An operator's `triton_ops.py` never indexes a kernel itself. That lets the same launcher code run a
kernel, be compiled ahead of time for a GPU that is not here (`recording`, on meta tensors), and be
counted.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Scalar = int | float
Argument = Tensor | Scalar | None


@dataclass(frozen=True, slots=True)
class Launch:
    """A call that was recorded instead of made.

    arguments: the kernel's positional arguments in order. constants: its constexpr arguments by
    name. num_warps, num_stages: as Triton takes them.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Argument, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded launches", default=None)
_target: ContextVar[str] = ContextVar("target that launches are recorded for", default="")


def launch(
    kernel: Any,
    grid: Sequence[int],
    *arguments: Argument,
    num_warps: int = 4,
    num_stages: int = 2,
    **constants: Any,
) -> None:
    """Runs `kernel` on as many programs as `grid` says, with `constants` as its constexprs.

    An empty grid launches nothing: CUDA refuses one. Raises ValueError where a tensor is on a
    device that runs no kernels.
    """
    if 0 in grid:
        return
    records = _recorded.get()
    if records is not None:
        shape = tuple(grid)
        records.append(Launch(kernel, shape, arguments, constants, num_warps, num_stages))
        return
    for argument in arguments:
        if isinstance(argument, Tensor) and not runs_on(argument.device.type):
            raise ValueError(f"{kernel.__name__}: Triton runs no kernel on {argument.device}")
    kernel[tuple(grid)](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)


@contextmanager
def recording(for_target: str = "sm_90") -> Iterator[list[Launch]]:
    """Launches inside are noted in the list and not made; outputs keep what was in them.

    for_target: what `target` answers meanwhile.
    """
    records: list[Launch] = []
    recorded, targeted = _recorded.set(records), _target.set(for_target)
    try:
        yield records
    finally:
        _recorded.reset(recorded)
        _target.reset(targeted)


def target() -> str:
    """The GPU that launchers choose block sizes for: "sm_90", "gfx942", ...; "" in the interpreter.

    AMD's begin with "gfx": waves of 64 threads, 64 KB of shared memory.
    """
    return _target.get() or _target_here()


@cache
def _target_here() -> str:
    if interpreted() or not torch.cuda.is_available():
        return ""
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    if torch.version.hip:
        return str(facts.gcnArchName).partition(":")[0]
    return f"sm_{facts.major}{facts.minor}"


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. It counts at the first import of a kernel."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_on(device_type: str) -> bool:
    return device_type == ("cpu" if interpreted() else "cuda")


def power_of_two(count: int) -> int:
    """The smallest one >= count: what a Triton block's extent must be."""
    return 1 << max(0, count - 1).bit_length()


def blocks(count: int, block: int) -> int:
    return -(-count // block)


def dense_rows(x: Tensor) -> Tensor:
    """x itself where the elements of its last axis lie side by side, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def warps_of(block: int) -> int:
    """For a program that goes over `block` elements of a row: 16 for each thread, 4 to 16 warps."""
    return min(16, max(4, block // 512))
