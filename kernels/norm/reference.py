"""RMS normalisation, the equation."""

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """weight * cast(x / sqrt(mean(x^2) + eps)): float32 statistics, x's dtype before the weight."""
    x32 = x_TH.float()
    normed = x32 / torch.sqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x_TH.dtype) * weight_H.to(x_TH.dtype)


def gated_rms_norm(x_THD: Tensor, weight_D: Tensor, gate_THD: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate), float32 inside, result in the gate's dtype."""
    normed = rms_norm(x_THD.float(), weight_D.float(), eps)
    return (normed * torch.sigmoid(gate_THD.float())).to(gate_THD.dtype)
