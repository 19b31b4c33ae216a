"""How far a result may be from the exact one, and how far it is."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Largest relative error of one rounding to nearest.
ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, slots=True)
class Claim:
    """`actual` is `exact` (float64) to within two bounds.

    l2: of |actual - exact| / |exact| over the whole tensor. Every element may be off by `roundings`
    roundings of its own dtype and by `noise` times the root mean square of the exact tensor.
    Both 0: equal bit by bit.
    """

    name: str
    actual: Tensor
    exact: Tensor
    l2: float = 0.0
    roundings: int = 0
    noise: float = 0.0

    def judge(self) -> dict[str, Any]:
        """Errors, bounds and whether the claim holds. `worst`: the largest error of an element in
        units of what it may be off; NaN where one is and the other is not counts as infinite."""
        actual, exact = self.actual.detach().to(self.exact.device, torch.float64), self.exact
        shape = list(actual.shape)
        if actual.shape != exact.shape:
            return {"holds": False, "shape": shape, "expected_shape": list(exact.shape)}
        same = (actual == exact) | (actual.isnan() & exact.isnan())
        error = torch.where(same, 0.0, (actual - exact).abs()).nan_to_num(nan=torch.inf)
        size = torch.where(exact.isfinite(), exact, 0.0)
        total = float(torch.linalg.vector_norm(size))
        l2 = float(torch.linalg.vector_norm(error)) / total if total else float(error.sum())
        rms = total / max(1, size.numel()) ** 0.5
        rounding = self.roundings * ROUNDING.get(self.actual.dtype, 0.0)
        allowed = size.abs() * rounding + self.noise * rms
        off = torch.where(error > 0, error / allowed, 0.0)
        worst = float(off.max()) if off.numel() else 0.0
        return {
            "holds": l2 <= self.l2 and worst <= 1.0,
            "shape": shape,
            "dtype": str(self.actual.dtype).removeprefix("torch."),
            "l2": l2,
            "l2_bound": self.l2,
            "worst": worst,
            "noise_bound": self.noise,
        }


def floating(name: str, actual: Tensor, exact: Tensor, *, l2: float, roundings: int = 1) -> Claim:
    """A claim whose elements may each be off by 16 times what the whole may: the largest of some
    hundred million normal errors is about 6 times their root mean square."""
    # Errors of rounding are spread: their root mean square is some 0.42 of the largest.
    own = 0.6 * roundings * ROUNDING.get(actual.dtype, 0.0)
    return Claim(name, actual, exact, l2=l2 + own, roundings=roundings, noise=16 * l2)


def none_above(name: str, amount: Tensor, limit: float) -> Claim:
    """No element of `amount` exceeds `limit`; NaN does."""
    excess = torch.where(amount <= limit, 0.0, amount.double() - limit)
    return Claim(name, excess, torch.zeros_like(excess))
