"""Elementwise functions whose bits do not depend on where an element sits in its tensor.

torch's vectorised CPU loops handle the last ``numel % 16`` elements of a contiguous tensor with a scalar
routine that rounds differently (measured for sigmoid, silu, softplus, exp2; not for exp, tanh, log1p).
A row would then change its bits when a companion joins the batch. Rows whose width is a multiple of 16
never meet the scalar tail; other widths are computed from ``exp``, which is position independent.
"""

import torch
from torch import Tensor

TAIL = 16  # floats per iteration of torch's AVX2 loop (two vectors); AVX-512 uses 32, see `aligned`
_WIDE = 32


def aligned(width: int) -> bool:
    """True when rows of `width` floats keep the vector loop free of a scalar tail."""
    return width % _WIDE == 0


def sigmoid(x: Tensor) -> Tensor:
    """Logistic sigmoid of float32 rows [..., W]; large negative inputs give 0, never NaN."""
    if aligned(x.shape[-1]):
        return torch.sigmoid(x)
    return torch.exp(-x).add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of float32 rows [..., W]; -inf gives NaN as in torch."""
    if aligned(x.shape[-1]):
        return torch.nn.functional.silu(x)
    return x * torch.exp(-x).add_(1.0).reciprocal_()


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without overflow: max(x, 0) + log1p(exp(-|x|))."""
    return torch.exp(-x.abs()).log1p_().add_(x.clamp(min=0.0))
