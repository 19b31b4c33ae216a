"""MXFP4 (E2M1 codes, one power-of-two scale per 32 values), fast on CPU.

Layout (compressed-tensors `mxfp4-pack-quantized`): byte c of a row holds element 2c in its low
nibble and 2c + 1 in its high nibble; scale byte b means 2^(b - 127); blocks of 32 run along the
last axis.
"""

from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INVALID_SCALE = 255


def _pair_table() -> Tensor:
    codes = torch.tensor([*CODES, *(-c for c in CODES)], dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((codes[byte & 15], codes[byte >> 4]), dim=1)


def _scale_table() -> Tensor:
    exact = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - 127.0)
    exact[INVALID_SCALE] = float("nan")
    return exact.to(torch.float32)


_PAIRS = _pair_table()  # [256, 2], constant
_SCALES = _scale_table()  # [256], constant; index 0 is the float32 subnormal 2^-127


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """uint8 [..., K/2] and uint8 [..., K/32] -> values [..., K] in `dtype`.

    Bit-exact in float32, subnormals included; 4 * 2^126 and above overflow to inf, as the cast of
    the exact product does. Scale byte 255 decodes to NaN: reject it at load (`invalid_scales`).
    """
    values = torch.nn.functional.embedding(packed.int(), _PAIRS)
    blocks = values.view(*scale.shape, BLOCK)
    blocks.mul_(_SCALES[scale.int()].unsqueeze(-1))
    return blocks.view(*packed.shape[:-1], 2 * packed.shape[-1]).to(dtype)


def invalid_scales(scale: Tensor) -> Tensor:
    """Indices int64 [n, scale.ndim] of scale bytes 255 (the E8M0 NaN); empty when all are valid."""
    return (scale == INVALID_SCALE).nonzero()


def mxfp4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [..., K] to (packed uint8 [..., K/2], scale uint8 [..., K/32]).

    Values round to the nearest code, ties to the even one. Of the exponents floor(log2(max)) - 2
    and one above, the one with the smaller squared error wins, so values that are already MXFP4
    survive unchanged. Raises ValueError if K is no multiple of 32 or the input is not finite.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"last axis {weight.shape[-1]} is not a multiple of {BLOCK}")
    blocks = weight.double().reshape(*weight.shape[:-1], -1, BLOCK)
    if not bool(torch.isfinite(blocks).all()):
        raise ValueError("MXFP4 cannot hold non-finite values")
    peak = blocks.abs().amax(-1, keepdim=True)
    low = torch.frexp(peak).exponent.sub(3).clamp(-127, 126)  # frexp mantissa is in [0.5, 1)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for exponent in (low, low + 1):
        unit = torch.pow(2.0, exponent.double())
        codes = _nearest_codes(blocks / unit)
        value = _PAIRS[codes, 0].double() * unit
        error = (value - blocks).square().sum(-1, keepdim=True)
        if best is None:
            best = (codes, exponent, error)
        else:
            better = error < best[2]
            best = (
                torch.where(better, codes, best[0]),
                torch.where(better, exponent, best[1]),
                torch.where(better, error, best[2]),
            )
    assert best is not None
    codes, exponent, _ = best
    codes = codes.reshape(*weight.shape[:-1], -1, 2)
    packed = (codes[..., 0] | (codes[..., 1] << 4)).to(torch.uint8)
    return packed, (exponent.squeeze(-1) + 127).to(torch.uint8)


def _nearest_codes(scaled: Tensor) -> Tensor:
    """Codes 0..15 of the nearest E2M1 values; halves go to the even code, overflow saturates."""
    magnitude = scaled.abs()
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(CODES)], dtype=torch.float64)
    up = torch.searchsorted(middles, magnitude, right=True)  # a tie goes up
    down = torch.searchsorted(middles, magnitude, right=False)  # a tie stays down
    codes = torch.where(up % 2 == 0, up, down)
    # Away from a tie both agree; at a tie exactly one of the two neighbours is even.
    negative = (scaled < 0) & (codes > 0)
    return codes + 8 * negative


FP8_PEAK = 448.0  # largest E4M3 value
# The smallest normal float32. Below it a scale would lose the digits that keep quotients under 448,
# and E4M3 has no infinity: what is larger becomes NaN.
FP8_SMALLEST_SCALE = 2.0**-126


def fp8_encode(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Rows as E4M3 codes with one scale each: (uint8 [T, D], scale float32 [T, 1]).

    A zero row keeps scale 1; a row with a NaN or an infinity is not finite when decoded. Codes are
    uint8 because neither gloo nor NCCL moves float8.
    """
    x32_TD = x_TD.float()
    peak_T1 = x32_TD.abs().amax(1, keepdim=True)
    scale_T1 = peak_T1.div(FP8_PEAK).clamp_(min=FP8_SMALLEST_SCALE)
    scale_T1.masked_fill_(peak_T1 == 0, 1.0)
    return (x32_TD / scale_T1).to(torch.float8_e4m3fn).view(torch.uint8), scale_T1


def fp8_decode(codes_TD: Tensor, scale_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """What `fp8_encode` took, within a relative 2^-4, in `dtype`. [T, D]"""
    return codes_TD.view(torch.float8_e4m3fn).float().mul_(scale_T1).to(dtype)
