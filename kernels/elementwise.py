"""Elementwise functions whose bits do not depend on where an element sits in its tensor.

torch's vectorised CPU loops hand the last elements of a contiguous tensor to a scalar routine that
rounds differently (measured for sigmoid, silu, softplus, exp2; not for exp, tanh, log1p, addcmul).
A row would then change its bits when a companion joins the batch. Rows whose width is a multiple
of `VECTOR` never meet that scalar tail; other widths are computed from ``exp``.
"""

from functools import cache

import torch
from torch import Tensor

VECTOR = 32  # floats per unrolled step of torch's CPU loops: 16 with AVX2, 32 with AVX-512


@cache
def constant(value: float) -> Tensor:
    """A 0-d float32 tensor. A Python number as operand costs 1.5 us more per call than this."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """Logistic sigmoid of float32 rows [..., W]; large negative inputs give 0, never NaN."""
    if x.shape[-1] % VECTOR == 0:
        return torch.sigmoid(x)
    return torch.exp(torch.neg(x)).add_(constant(1.0)).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of float32 rows [..., W]; -inf gives NaN as in torch."""
    if x.shape[-1] % VECTOR == 0:
        return torch.nn.functional.silu(x)
    return torch.div(x, torch.exp(torch.neg(x)).add_(constant(1.0)))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return torch.exp(x.abs().neg_()).log1p_().add_(torch.maximum(x, constant(0.0)))
