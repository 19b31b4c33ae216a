"""RMS normalisation, fast on CPU."""

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import sigmoid


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalise the last axis by its root mean square.

    Statistics in float32; the normalised value is cast to `x_TH.dtype` before the weight (as the official
    code does). Returns x_TH.dtype. Any leading shape.
    """
    if x_TH.dtype == torch.float32:
        return torch.rms_norm(x_TH, weight_H.shape, weight_H.to(torch.float32), eps)
    normed = torch.rms_norm(x_TH.float(), weight_H.shape, None, eps)
    return normed.to(x_TH.dtype) * weight_H.to(x_TH.dtype)


def gated_rms_norm(x_THD: Tensor, weight_D: Tensor, gate_THD: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate) over the last axis; the product is float32, cast to gate's dtype."""
    normed = torch.rms_norm(x_THD.float(), weight_D.shape, weight_D.float(), eps)
    return normed.mul_(sigmoid(gate_THD.float())).to(gate_THD.dtype)
