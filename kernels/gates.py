"""What a compiled kernel may use of a GPU: limits that Triton checks at the first launch or never.

A kernel that compiles may still spill its registers to memory, ask for more shared memory than a
block gets, do its products without tensor cores, or be an empty stub.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Gate = Literal[
    "compile",
    "spills",
    "shared",
    "tensor memory",
    "tensor cores",
    "instructions",
    "threads",
    "grid",
]

# Even a copy of one row takes more; a kernel that was optimised away has fewer.
LEAST_INSTRUCTIONS = 24
MOST_THREADS = 1024
MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU to compile for. backend, architecture, wave: as Triton names them. shared: bytes a
    block gets at most. tensor_memory: its columns."""

    name: str
    backend: str
    architecture: int | str
    wave: int
    shared: int
    tensor_memory: int = 512


TARGETS = {
    one.name: one
    for one in (
        Target("sm_90", "cuda", 90, 32, 232_448),
        Target("sm_100", "cuda", 100, 32, 232_448),
        Target("gfx942", "hip", "gfx942", 64, 65_536),
    )
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the compiler made. registers: per thread. spills: stores of registers to memory on
    NVIDIA, registers so stored on AMD. shared: bytes. tensor_memory: columns. dots: products of
    blocks in the kernel. tensor_core: instructions that tensor cores do. instructions: all, without
    padding. seconds: to compile."""

    registers: int
    spills: int
    shared: int
    tensor_memory: int
    dots: int
    tensor_core: int
    instructions: int
    seconds: float


def misses(
    usage: Usage, target: Target, warps: int, grid: tuple[int, ...]
) -> Iterator[tuple[Gate, str]]:
    """Each gate that the kernel misses, with what is wrong. grid: the largest it is launched on."""
    if usage.spills:
        yield "spills", f"{usage.spills} spilled"
    if usage.shared > target.shared:
        yield "shared", f"{usage.shared} bytes of shared memory; a block gets {target.shared}"
    if usage.tensor_memory > target.tensor_memory:
        yield (
            "tensor memory",
            f"{usage.tensor_memory} columns of tensor memory; there are {target.tensor_memory}",
        )
    if usage.dots and not usage.tensor_core:
        yield "tensor cores", "has dots, and no instruction of the tensor cores"
    if usage.instructions < LEAST_INSTRUCTIONS:
        yield "instructions", f"{usage.instructions} instructions: a stub"
    if warps * target.wave > MOST_THREADS:
        yield "threads", f"{warps * target.wave} threads; a block has {MOST_THREADS} at most"
    for axis, (size, most) in enumerate(zip(grid, MOST_PROGRAMS, strict=False)):
        if size > most:
            yield "grid", f"{size} programs on axis {axis}; there can be {most}"
