"""Plain records of the expert operator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

ExpertWeightsOf = Callable[[int], tuple[Tensor, Tensor]]
"""expert number -> (w13 [2I, D] gate rows first, w2 [D, I])"""


@dataclass(frozen=True, slots=True)
class Glu:
    """Activation of the expert: SiTU with its two betas, or SiLU.

    `linear_beta` None leaves the up branch untransformed.
    """

    kind: Literal["situ", "silu"]
    beta: float = 1.0
    linear_beta: float | None = None
