"""Sketches of cached rows, fast, on any device. The equations are in `reference.py`."""

import torch
from torch import Tensor

from expertmesh.kernels.sketch.types import Basis

WIDE_MOST, NARROW_MOST = 127, 7
HALF_MOST = torch.finfo(torch.float16).max


def sketch_encode(rows_TC: Tensor, basis: Basis) -> tuple[Tensor, Tensor]:
    """Codes uint8 [T, B] and scales float16 [T] of cached rows [T, C]."""
    y_TS = (rows_TC.float() - basis.mean_C) @ basis.encode_CS
    scales_T = y_TS.abs().amax(dim=1).clamp_(max=HALF_MOST).to(torch.float16)
    unit_TS = y_TS / scales_T.float().clamp(min=torch.finfo(torch.float16).tiny).unsqueeze(1)
    wide = (unit_TS[:, : basis.wide] * WIDE_MOST).round_().clamp_(-WIDE_MOST, WIDE_MOST)
    narrow = (unit_TS[:, basis.wide :] * NARROW_MOST).round_().clamp_(-NARROW_MOST, NARROW_MOST)
    low, high = (narrow.to(torch.int16) + 8).unflatten(1, (-1, 2)).unbind(2)
    codes_TB = torch.cat(
        [wide.to(torch.int8).view(torch.uint8), (low + 16 * high).to(torch.uint8)], 1
    )
    return codes_TB, scales_T


def sketch_decode(codes_TB: Tensor, scales_T: Tensor, basis: Basis) -> Tensor:
    """The coordinates y as they were stored, float32 [T, S]."""
    wide, halves = codes_TB[:, : basis.wide], codes_TB[:, basis.wide :]
    y_TS = torch.empty(codes_TB.shape[0], basis.kept, dtype=torch.float32, device=codes_TB.device)
    torch.mul(wide.view(torch.int8), 1 / WIDE_MOST, out=y_TS[:, : basis.wide])
    narrow = y_TS[:, basis.wide :].unflatten(1, (-1, 2))
    narrow[..., 0] = halves & 15
    narrow[..., 1] = halves >> 4
    y_TS[:, basis.wide :].sub_(8).mul_(1 / NARROW_MOST)
    return y_TS.mul_(scales_T.float().unsqueeze(1))


def sketch_scores(
    q_HC: Tensor, codes_TB: Tensor, scales_T: Tensor, basis: Basis, scale: float
) -> Tensor:
    """Estimates of scale * q . z, float32 [H, T]."""
    q_HC = q_HC.float() * scale
    y_TS = sketch_decode(codes_TB, scales_T, basis)
    return torch.addmm((q_HC @ basis.mean_C).unsqueeze(1), q_HC @ basis.decode_CS, y_TS.t())


def sketch_sum(weights_HT: Tensor, codes_TB: Tensor, scales_T: Tensor, basis: Basis) -> Tensor:
    """sum_t weight_t * (estimate of row t), float32 [H, C]."""
    y_HS = weights_HT @ sketch_decode(codes_TB, scales_T, basis)
    mean_HC = weights_HT.sum(dim=1, keepdim=True) * basis.mean_C
    return torch.addmm(mean_HC, y_HS, basis.decode_CS.t())
