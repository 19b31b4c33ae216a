"""Operators at K3's shapes: what the compile gates, the floors and the GPU benchmarks run.

Each operator's folder has a `cases.py` with `CASES`, a list of `Case`. Shapes are those of the
published K3 configuration: decode means up to 64 sequences on one attention actor, or the rows that
reach one expert actor of 64; prefill means 4,096 tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from expertmesh.kernels.registry import OPERATORS
from expertmesh.kernels.work import Work

HIDDEN, HEADS, HEAD_DIM = 7168, 96, 128
LATENT_RANK, ROPE_DIM, VOCABULARY = 512, 64, 163_840
EXPERTS, TOP_K, LATENT, INNER = 896, 16, 3584, 3072
ATTN_RES_SOURCES = 9
DECODE_ROWS, PREFILL_ROWS = 64, 4096

Phase = Literal["decode", "prefill"]
# Rows of an operator that does the same in both.
PHASES: tuple[tuple[Phase, int], ...] = (("decode", DECODE_ROWS), ("prefill", PREFILL_ROWS))


class Make:
    """Inputs on one device, the same numbers for the same seed; on "meta" shapes alone."""

    def __init__(self, device: torch.device | str = "meta", seed: int = 0) -> None:
        self.device = torch.device(device)
        self._generator = torch.Generator("cpu").manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = torch.randn(shape, generator=self._generator) * scale
        return drawn.to(self.device, dtype)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform in [0, high)."""
        if self.device.type == "meta":
            return torch.empty(shape, dtype=dtype, device="meta")
        drawn = torch.randint(high, shape, generator=self._generator)
        return drawn.to(self.device, dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def of(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """A tensor of given values; on "meta" its shape alone."""
        return torch.tensor(values, dtype=dtype).to(self.device)


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    operator: its name in the registry. arguments: builds the operator's positional arguments.
    work: the least it must move and compute. exceptions: gates that it may miss on a target, with
    the reason: {(target, kernel, gate): reason}.
    """

    operator: str
    phase: Phase
    size: str
    arguments: Callable[[Make], tuple[Any, ...]]
    work: Work
    exceptions: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.operator}/{self.phase}/{self.size}"


def all_cases() -> list[Case]:
    """Those of every folder beside this file, in the order of the folders' names."""
    homes = sorted(path.parent.name for path in Path(__file__).parent.glob("*/cases.py"))
    found: list[Case] = []
    for home in homes:
        found += import_module(f"expertmesh.kernels.{home}.cases").CASES
    return found


def cases_of(operators: Sequence[str]) -> list[Case]:
    """Those of the named operators, or all. Raises ValueError where one is unknown or has none."""
    found = all_cases()
    for name in operators:
        if name not in OPERATORS:
            raise ValueError(f"unknown operator {name!r}; there are {', '.join(OPERATORS)}")
        if all(case.operator != name for case in found):
            reason = OPERATORS[name].without_triton or "it launches nothing"
            raise ValueError(f"{name} has no kernel: {reason}")
    return [case for case in found if not operators or case.operator in operators]
