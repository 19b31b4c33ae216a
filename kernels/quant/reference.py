"""MXFP4, the definition: value = code * 2^(scale - 127), one scale per 32 values (k3-model 3.3)."""

import math

import torch
from torch import Tensor

BLOCK = 32
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Byte c holds element 2c (low nibble) and 2c + 1 (high nibble); float64, cast once."""
    rows = packed.reshape(-1, packed.shape[-1]).tolist()
    scales = scale.reshape(-1, scale.shape[-1]).tolist()
    out = []
    for row, row_scales in zip(rows, scales, strict=True):
        codes = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        values = []
        for k, code in enumerate(codes):
            b = row_scales[k // BLOCK]
            unit = math.nan if b == 255 else 2.0 ** (b - 127)
            values.append(math.copysign(CODES[code & 7], -1.0 if code & 8 else 1.0) * unit)
        out.append(values)
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    return torch.tensor(out, dtype=torch.float64).float().to(dtype).reshape(shape)


def mxfp4_encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes (ties to even) under the better of two exponents around the largest value."""
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"last axis {weight.shape[-1]} is not a multiple of {BLOCK}")
    packed, scales = [], []
    for block in weight.double().reshape(-1, BLOCK).tolist():
        if not all(map(math.isfinite, block)):
            raise ValueError("MXFP4 cannot hold non-finite values")
        peak = max(abs(x) for x in block)
        low = min(max(math.frexp(peak)[1] - 3, -127), 126)
        trials = []
        for exponent in (low, low + 1):
            codes = [_nearest_code(x / 2.0**exponent) for x in block]
            error = sum(
                (math.copysign(CODES[c & 7] * 2.0**exponent, x) - x) ** 2
                for c, x in zip(codes, block, strict=True)
            )
            trials.append((error, exponent, codes))
        _, exponent, codes = trials[1] if trials[1][0] < trials[0][0] else trials[0]
        packed.append([codes[i] | codes[i + 1] << 4 for i in range(0, BLOCK, 2)])
        scales.append(exponent + 127)
    lead = weight.shape[:-1]
    return (
        torch.tensor(packed, dtype=torch.uint8).reshape(*lead, -1),
        torch.tensor(scales, dtype=torch.uint8).reshape(*lead, -1),
    )


def _nearest_code(x: float) -> int:
    """Code of the nearest magnitude; of two equally near ones the even code. Zero has no sign."""
    best = min(range(8), key=lambda c: (abs(abs(x) - CODES[c]), c % 2))
    return best + 8 if x < 0 and best else best


FP8_PEAK = 448.0  # largest E4M3 value
FP8_SMALLEST_SCALE = 2.0**-126  # the smallest normal float32


def fp8_encode(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """One scale per row, peak / 448; the quotient rounds to E4M3, ties to even.

    Returns (codes uint8 [T, D], scale float32 [T, 1]); a zero row has scale 1, no other one a
    subnormal scale.
    """
    codes = torch.empty(x_TD.shape, dtype=torch.uint8)
    scale = torch.empty(x_TD.shape[0], 1, dtype=torch.float32)
    for t, row in enumerate(x_TD.float()):
        peak = float(row.abs().max()) if row.numel() else 0.0
        ratio = float(torch.tensor(peak, dtype=torch.float32) / FP8_PEAK)
        scale[t] = (FP8_SMALLEST_SCALE if ratio < FP8_SMALLEST_SCALE else ratio) if peak else 1.0
        codes[t] = (row / scale[t]).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scale


def fp8_decode(codes_TD: Tensor, scale_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """value * scale in float32, then `dtype`. [T, D]"""
    return (codes_TD.view(torch.float8_e4m3fn).float() * scale_T1).to(dtype)
