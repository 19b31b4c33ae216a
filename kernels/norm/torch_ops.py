"""RMS normalisation, fast on CPU."""

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import constant, sigmoid


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept; x float32. Three calls, one pass."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(constant(eps), norm, norm, value=1.0 / x.shape[-1]).rsqrt_()


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalise the last axis by its root mean square.

    Statistics in float32; the normalised value is cast to x's dtype before the weight (as the
    official code does). Returns x's dtype. Any leading shape.
    """
    if x_TH.dtype == torch.float32:
        return torch.mul(x_TH, inverse_rms(x_TH, eps)).mul_(weight_H)
    x32_TH = x_TH.float()
    normed = x32_TH.mul_(inverse_rms(x32_TH, eps)).to(x_TH.dtype)
    return normed.mul_(weight_H.to(x_TH.dtype))


def gated_rms_norm(x_THD: Tensor, weight_D: Tensor, gate_THD: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate) over the last axis; float32 inside, result in gate's dtype."""
    x32_THD = x_THD.float()
    normed = torch.mul(x32_THD, inverse_rms(x32_THD, eps)).mul_(weight_D)
    return normed.mul_(sigmoid(gate_THD.float())).type_as(gate_THD)
