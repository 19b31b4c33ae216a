"""Plain records of the expert operator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from expertmesh.kernels.latent_moe.tables import ExpertTable
from expertmesh.kernels.linear.half import HalfMatrix

ExpertWeightsOf = Callable[[int], tuple[Tensor, Tensor]]
"""expert number -> (w13 [2I, D] gate rows first, w2 [D, I])"""


class Experts(Protocol):
    """The experts of one layer: matrices for those who multiply on the host's word, a table for
    kernels that find them by themselves."""

    def __call__(self, expert: int) -> tuple[Tensor, Tensor]: ...

    def matrices(
        self, experts: Sequence[int]
    ) -> list[tuple[Tensor | HalfMatrix, Tensor | HalfMatrix]]:
        """The same of each, as they are kept for products."""
        ...

    def table(self) -> ExpertTable: ...


@dataclass(frozen=True, slots=True)
class Glu:
    """Activation of the expert: SiTU with its two betas, or SiLU.

    `linear_beta` None leaves the up branch untransformed.
    """

    kind: Literal["situ", "silu"]
    beta: float = 1.0
    linear_beta: float | None = None
