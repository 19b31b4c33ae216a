"""Sketches of cached rows, the equations. Token by token."""

import torch
from torch import Tensor

from expertmesh.kernels.sketch.types import Basis

WIDE_MOST, NARROW_MOST = 127, 7


def sketch_encode(rows_TC: Tensor, basis: Basis) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, B] and scales float16 [T].

    y = (z - mean) @ encode;  scale = max |y|, at most float16's;  the first W coordinates as
    round(127 y / scale) in one byte each, the others as round(7 y / scale) + 8 in half a byte, the
    earlier in the low half.
    """
    codes = torch.empty(rows_TC.shape[0], basis.code_bytes, dtype=torch.uint8)
    scales = torch.empty(rows_TC.shape[0], dtype=torch.float16)
    for t, row in enumerate(rows_TC):
        y = (row.float() - basis.mean_C) @ basis.encode_CS
        scales[t] = y.abs().max().clamp(max=torch.finfo(torch.float16).max)
        scale = scales[t].float()
        unit = y / scale if scale > 0 else torch.zeros_like(y)
        for i in range(basis.wide):
            level = int((unit[i] * WIDE_MOST).round().clamp(-WIDE_MOST, WIDE_MOST))
            codes[t, i] = level % 256
        for i in range(basis.wide, basis.kept, 2):
            low, high = (
                int((unit[j] * NARROW_MOST).round().clamp(-NARROW_MOST, NARROW_MOST)) + 8
                for j in (i, i + 1)
            )
            codes[t, basis.wide + (i - basis.wide) // 2] = low + 16 * high
    return codes, scales


def sketch_decode(codes_TB: Tensor, scales_T: Tensor, basis: Basis) -> Tensor:
    """The coordinates y as they were stored, float32 [T, S]."""
    y = torch.empty(codes_TB.shape[0], basis.kept)
    for t in range(codes_TB.shape[0]):
        scale = scales_T[t].float()
        for i in range(basis.wide):
            byte = int(codes_TB[t, i])
            y[t, i] = (byte - 256 if byte > 127 else byte) * scale / WIDE_MOST
        for i in range(basis.wide, basis.kept, 2):
            byte = int(codes_TB[t, basis.wide + (i - basis.wide) // 2])
            y[t, i] = (byte % 16 - 8) * scale / NARROW_MOST
            y[t, i + 1] = (byte // 16 - 8) * scale / NARROW_MOST
    return y


def sketch_scores(
    q_HC: Tensor, codes_TB: Tensor, scales_T: Tensor, basis: Basis, scale: float
) -> Tensor:
    """Estimates of scale * q . z, float32 [H, T]."""
    y = sketch_decode(codes_TB, scales_T, basis)
    scores = torch.empty(q_HC.shape[0], y.shape[0])
    for h, q in enumerate(q_HC.float()):
        for t in range(y.shape[0]):
            scores[h, t] = scale * (q @ (basis.mean_C + basis.decode_CS @ y[t]))
    return scores


def sketch_sum(weights_HT: Tensor, codes_TB: Tensor, scales_T: Tensor, basis: Basis) -> Tensor:
    """sum_t weight_t * (estimate of row t), float32 [H, C]."""
    y = sketch_decode(codes_TB, scales_T, basis)
    total = torch.zeros(weights_HT.shape[0], basis.mean_C.shape[0])
    for t in range(y.shape[0]):
        total += weights_HT[:, t : t + 1] * (basis.mean_C + basis.decode_CS @ y[t])
    return total
