"""What an operator must move and compute at least, and how long a GPU needs for that.

The floor of an operator is the larger of two times: every byte once over the memory bus, every
operation at the peak rate of the unit that does it. A kernel cannot be faster; how near it comes is
what `expertmesh bench kernels` prints.
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["fp32", "tf32", "bf16", "fp8"]


@dataclass(frozen=True, slots=True)
class Work:
    """bytes: read plus written, each once. flops: a multiply-add counts two, done by `unit`
    ("fp32": ordinary cores; the others: tensor cores)."""

    bytes: int
    flops: int = 0
    unit: Unit = "fp32"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Peak rates of a data sheet, without sparsity: bytes/s, flop/s by unit."""

    name: str
    bandwidth: float
    rates: dict[Unit, float]

    def floor_us(self, work: Work) -> float:
        """Microseconds that `work` takes at least."""
        return 1e6 * max(work.bytes / self.bandwidth, work.flops / self.rates[work.unit])

    def bound(self, work: Work) -> Literal["memory", "compute"]:
        by_memory = work.bytes / self.bandwidth >= work.flops / self.rates[work.unit]
        return "memory" if by_memory else "compute"


# NVIDIA H200 SXM data sheet.
H200 = Accelerator(
    "H200", 4.8e12, {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp8": 1978.9e12}
)
