"""mxfp4 for expert weights: quantise, pack, unpack, and the straight-through training version.

A block is 32 values along the input dimension with one power-of-two scale, stored as a biased
exponent byte. Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; codes 8..15 their negatives. Byte c of a
row holds element 2c in its low nibble and element 2c+1 in its high nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbouring magnitudes.
BOUNDARIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float -> codes [..., K] uint8 (0..15) and scale bytes [..., K/32] uint8."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    peak = blocks.abs().amax(dim=-1)
    # 7 = halfway between 6 and 8: scaling so that the peak lands in [3.5, 7) clips it by < 1/6 at
    # worst, which costs less than losing the lowest bit of every other value in the block.
    exponent = torch.ceil(torch.log2(peak.clamp_min(2.0**-120) / 7.0)).clamp(-BIAS + 1, BIAS)
    scaled = blocks * torch.exp2(-exponent).unsqueeze(-1)
    bounds = torch.tensor(BOUNDARIES, device=weight.device)
    code = torch.bucketize(scaled.abs(), bounds).to(torch.uint8)
    code = code | ((scaled < 0) & (code > 0)).to(torch.uint8) << 3
    return code.flatten(-2), (exponent + BIAS).to(torch.uint8)


def dequantise(code: Tensor, scale: Tensor) -> Tensor:
    """Codes [..., K] and scale bytes [..., K/32] -> float32 [..., K]."""
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), device=code.device)
    values = table[code.int()].unflatten(-1, (-1, BLOCK))
    return (values * torch.exp2(scale.float() - BIAS).unsqueeze(-1)).flatten(-2)


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] float -> (weight_packed [N, K/2] uint8, weight_scale [N, K/32] uint8)."""
    code, scale = quantise(weight)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).contiguous(), scale


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `pack` up to the rounding done there: float32 [N, K]."""
    code = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return dequantise(code, scale)
