"""Kimi Delta Attention: decode and chunked prefill, fast on CPU; equations in `reference.py`.

State [S, H, Dk, Dv] float32 and the window of past projections [S, W-1, C] (C = q|k|v of all
heads, oldest row first) are updated in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import constant, sigmoid, silu, softplus
from expertmesh.kernels.kda.chunk import kda_chunk
from expertmesh.kernels.kda.types import CHUNK, KdaSpan

QK_EPS = 1e-6
# Rows whose state is at most this large are gathered when slots are scattered; larger ones are
# updated where they are, one run of slots at a time: moving them costs more than the calls.
GATHER_BYTES = 128 * 1024

__all__ = ["kda_chunk", "kda_decode", "kda_gate", "kda_prefill", "l2_normalise", "short_conv"]


def kda_gate(
    z_THD: Tensor, A_log_H: Tensor, dt_bias_HD: Tensor, lower_bound: float | None
) -> Tensor:
    """Log-decay <= 0, float32: lb * sigmoid(exp(A) x) or -exp(A) * softplus(x), x = z + dt."""
    rate_H1 = A_log_H.exp().unsqueeze(-1)
    x_THD = torch.add(z_THD, dt_bias_HD)
    if lower_bound is None:
        return softplus(x_THD).mul_(rate_H1.neg_())
    return sigmoid(x_THD.mul_(rate_H1)).mul_(constant(lower_bound))


def l2_normalise(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, float32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.mul(x, torch.addcmul(constant(QK_EPS), norm, norm).rsqrt_())


def short_conv(qkv_TC: Tensor, conv_weight_CW: Tensor, window_VC: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU of one sequence; float32 inside, qkv's dtype out.

    window_VC: the W-1 rows before the first one, oldest first; updated in place to the last W-1.
    """
    width = conv_weight_CW.shape[1]
    rows = qkv_TC.shape[0]
    padded = torch.cat((window_VC, qkv_TC))
    window_VC.copy_(padded[rows:])
    padded = padded.float()
    weight_WC = conv_weight_CW.t().contiguous()
    y_TC = torch.mul(padded[:rows], weight_WC[0])
    for tap in range(1, width):
        y_TC.addcmul_(padded[tap : tap + rows], weight_WC[tap])
    return silu(y_TC).to(qkv_TC.dtype)


def _runs(slots: list[int]) -> list[tuple[int, int, int]]:
    """Maximal runs of consecutive slots as (first row, end row, first slot)."""
    runs, start = [], 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[row - 1] + 1:
            runs.append((start, row, slots[start]))
            start = row
    return runs


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
    """One token per row; slots must be distinct. Returns float32 [B, H, D].

    Fastest when the rows come in runs of consecutive slots (their state is then never copied) and
    when `conv_weight_CW` is the transpose of a contiguous [W, C].
    """
    rows, heads, dim = z_BHD.shape
    runs = _runs(slots_B.tolist())
    y_BC = _decode_conv(qkv_BC, conv_weight_CW, conv_state, slots_B, runs)
    y_BND = y_BC.view(rows, 3 * heads, dim)
    qk_BND = l2_normalise(y_BND[:, : 2 * heads])
    q_BHD, k_BHD, v_BHD = qk_BND[:, :heads], qk_BND[:, heads:], y_BND[:, 2 * heads :]
    decay_BHD = kda_gate(z_BHD.float(), A_log_H, dt_bias_HD, lower_bound).exp_()
    # Expanded to D so that its rows never end in a scalar tail.
    beta_BHD = sigmoid(beta_BH.float().unsqueeze(-1).expand(rows, heads, dim))
    inputs = (q_BHD, k_BHD, v_BHD, decay_BHD, beta_BHD)
    if len(runs) == 1:
        out_BHD = _decode_step(state[runs[0][2] : runs[0][2] + rows], *inputs)
    elif len(runs) > 4 and 4 * heads * dim * dim <= GATHER_BYTES:
        gathered = state.index_select(0, slots_B)
        out_BHD = _decode_step(gathered, *inputs)
        for begin, end, slot in runs:  # index_copy_ moves single elements, copy_ whole rows
            state[slot : slot + end - begin].copy_(gathered[begin:end])
    else:
        out_BHD = z_BHD.new_empty(rows, heads, dim, dtype=torch.float32)
        for begin, end, slot in runs:
            part = (x[begin:end] for x in inputs)
            out_BHD[begin:end] = _decode_step(state[slot : slot + end - begin], *part)
    return out_BHD.mul_(constant(dim**-0.5))  # the scale of q, applied to the product


def _decode_conv(
    qkv_BC: Tensor,
    conv_weight_CW: Tensor,
    conv_state: Tensor,
    slots_B: Tensor,
    runs: list[tuple[int, int, int]],
) -> Tensor:
    """Convolution and SiLU of one new row per slot, float32 [B, C]; shifts the windows."""
    single = conv_state[runs[0][2] : runs[0][2] + len(qkv_BC)] if len(runs) == 1 else None
    past_BVC = conv_state.index_select(0, slots_B) if single is None else single
    window_BWC = torch.cat((past_BVC, qkv_BC.unsqueeze(1)), dim=1)
    if single is None:
        conv_state.index_copy_(0, slots_B, window_BWC[:, 1:])
    else:
        single.copy_(window_BWC[:, 1:])
    y_BC = silu(torch.mul(window_BWC.float(), conv_weight_CW.t()).sum(1))
    return y_BC if qkv_BC.dtype == torch.float32 else y_BC.to(qkv_BC.dtype).float()


def _decode_step(
    state_BHDD: Tensor,
    q_BHD: Tensor,
    k_BHD: Tensor,
    v_BHD: Tensor,
    decay_BHD: Tensor,
    beta_BHD: Tensor,
) -> Tensor:
    """Decay, delta update (both in place) and read-out; q without its scale. Returns [B, H, D]."""
    shape = v_BHD.shape
    flat = state_BHDD.view(-1, *state_BHDD.shape[2:])
    # (decay k)^T S equals k^T (decay S): the prediction needs no pass over the decayed state.
    key = torch.mul(k_BHD, decay_BHD)
    predicted = torch.bmm(key.view(flat.shape[0], 1, -1), flat).view(shape)
    delta = torch.sub(v_BHD, predicted).mul_(beta_BHD)
    state_BHDD.mul_(decay_BHD.unsqueeze(-1)).addcmul_(k_BHD.unsqueeze(-1), delta.unsqueeze(-2))
    return torch.bmm(q_BHD.reshape(flat.shape[0], 1, -1), flat).view(shape)


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

    Spans are `KdaSpan`s or plain tuples of the same order. Every span is cut at absolute multiples
    of 64 and every chunk is computed as 64 rows (missing rows are exact no-ops), so a prefill cut
    at multiples of 64 is bit-identical to one in a single piece.
    """
    rows, heads, dim = z_THD.shape
    out_THD = torch.zeros(rows, heads, dim, dtype=torch.float32)
    for span in spans:
        slot, begin, end, position = KdaSpan(*span)
        if end <= begin:
            continue
        y_TC = short_conv(qkv_TC[begin:end], conv_weight_CW, conv_state[slot]).float()
        y_TND = y_TC.view(end - begin, 3 * heads, dim)
        qk_TND = l2_normalise(y_TND[:, : 2 * heads])
        gate_THD = kda_gate(z_THD[begin:end].float(), A_log_H, dt_bias_HD, lower_bound)
        beta_THD = beta_TH[begin:end].float().unsqueeze(-1).expand(end - begin, heads, dim)
        out_THD[begin:end] = kda_chunk(
            qk_TND[:, :heads].mul_(constant(dim**-0.5)),
            qk_TND[:, heads:],
            y_TND[:, 2 * heads :],
            gate_THD,
            sigmoid(beta_THD)[:, :, 0],
            state[slot],
            position % CHUNK,
        )
    return out_THD
