"""Kimi Delta Attention: decode and chunked prefill, fast on CPU. The equations are in `reference.py`.

State [S, H, Dk, Dv] float32 and the window of past projections [S, W-1, C] (C = q|k|v of all heads) are
updated in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import sigmoid, silu, softplus
from expertmesh.kernels.kda.chunk import kda_chunk
from expertmesh.kernels.kda.types import CHUNK, KdaSpan

QK_EPS = 1e-6

__all__ = ["kda_chunk", "kda_decode", "kda_gate", "kda_prefill", "l2_normalise", "short_conv"]


def kda_gate(
    z_THD: Tensor, A_log_H: Tensor, dt_bias_HD: Tensor, lower_bound: float | None
) -> Tensor:
    """Log-decay, float32, <= 0: lower_bound * sigmoid(exp(A)(z + dt)), or -exp(A) * softplus(z + dt)."""
    rate_H1 = A_log_H.exp().unsqueeze(-1)
    x_THD = z_THD + dt_bias_HD
    if lower_bound is None:
        return softplus(x_THD).mul_(-rate_H1)
    return sigmoid(x_THD.mul_(rate_H1)).mul_(lower_bound)


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, float32."""
    return x * torch.linalg.vecdot(x, x).add_(QK_EPS).rsqrt_().unsqueeze(-1)


def short_conv(qkv_TC: Tensor, conv_weight_CW: Tensor, window_VC: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of one sequence; float32 inside, result in qkv's dtype.

    window_VC: the W-1 rows before the first one (oldest first); updated in place to the last W-1 rows.
    """
    width = conv_weight_CW.shape[1]
    rows = qkv_TC.shape[0]
    padded = torch.cat((window_VC, qkv_TC))
    window_VC.copy_(padded[rows:])
    weight_WC = conv_weight_CW.t().contiguous()
    padded = padded.float()
    y_TC = padded[:rows] * weight_WC[0]
    for tap in range(1, width):
        y_TC += padded[tap : tap + rows] * weight_WC[tap]
    return silu(y_TC).to(qkv_TC.dtype)


def kda_decode(
    qkv_BC: Tensor,
    z_BHD: Tensor,
    beta_BH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """One token per row; slots must be distinct. Returns float32 [B, H, D]."""
    rows, heads, dim = z_BHD.shape
    window_BWC = torch.cat((conv_state.index_select(0, slots_B), qkv_BC.unsqueeze(1)), dim=1)
    conv_state.index_copy_(0, slots_B, window_BWC[:, 1:])
    y_BC = silu((window_BWC.float() * conv_weight_CW.t()).sum(1)).to(qkv_BC.dtype).float()
    y_BNHD = y_BC.view(rows, 3, heads, dim)
    qk_BNHD = l2_normalise(y_BNHD[:, :2])
    q_BHD, k_BHD, v_BHD = qk_BNHD[:, 0], qk_BNHD[:, 1], y_BNHD[:, 2]
    decay_BHD = kda_gate(z_BHD.float(), A_log_H, dt_bias_HD, lower_bound).exp_()
    # Expanded to D so that its rows never end in a scalar tail.
    beta_BHD = sigmoid(beta_BH.float().unsqueeze(-1).expand(rows, heads, dim))

    s_BHDD = state.index_select(0, slots_B)
    # One read of S serves both products: (decay k)^T S is the prediction, (decay q)^T S the old part of o.
    probe_BH2D = torch.stack((decay_BHD * k_BHD, decay_BHD * q_BHD), dim=2)
    read_BH2D = torch.matmul(probe_BH2D, s_BHDD)
    delta_BHD = (v_BHD - read_BH2D[:, :, 0]).mul_(beta_BHD)
    overlap_BH1 = torch.linalg.vecdot(q_BHD, k_BHD).unsqueeze(-1)
    out_BHD = torch.addcmul(read_BH2D[:, :, 1], overlap_BH1, delta_BHD).mul_(dim**-0.5)
    s_BHDD.mul_(decay_BHD.unsqueeze(-1))
    flat = s_BHDD.view(rows * heads, dim, dim)
    flat.baddbmm_(k_BHD.reshape(rows * heads, dim, 1), delta_BHD.reshape(rows * heads, 1, dim))
    state.index_copy_(0, slots_B, s_BHDD)
    return out_BHD


def kda_prefill(
    qkv_TC: Tensor,
    z_THD: Tensor,
    beta_TH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
) -> Tensor:
    """Many tokens per sequence. Returns float32 [T, H, D], zero outside the spans.

    Every span is cut at absolute multiples of 64 and every chunk is computed as 64 rows (missing rows are
    exact no-ops), so a prefill cut at multiples of 64 is bit-identical to one in a single piece.
    """
    rows, heads, dim = z_THD.shape
    out_THD = torch.zeros(rows, heads, dim, dtype=torch.float32)
    for span in spans:
        slot, begin, end, position = KdaSpan(*span)
        if end <= begin:
            continue
        y = short_conv(qkv_TC[begin:end], conv_weight_CW, conv_state[slot]).float()
        y_TNHD = y.view(end - begin, 3, heads, dim)
        qk_TNHD = l2_normalise(y_TNHD[:, :2])
        gate_THD = kda_gate(z_THD[begin:end].float(), A_log_H, dt_bias_HD, lower_bound)
        beta_THD = sigmoid(beta_TH[begin:end].float().unsqueeze(-1).expand(end - begin, heads, dim))
        out_THD[begin:end] = kda_chunk(
            qk_TNHD[:, 0].mul_(dim**-0.5),
            qk_TNHD[:, 1],
            y_TNHD[:, 2],
            gate_THD,
            beta_THD[:, :, 0],
            state[slot],
            position % CHUNK,
        )
    return out_THD
