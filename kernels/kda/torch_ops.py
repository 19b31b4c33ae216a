"""Kimi Delta Attention: decode and chunked prefill, fast on CPU; equations in `reference.py`.

State [S, H, Dk, Dv] float32 and the window of past projections [S, W-1, C] (C = q|k|v of all
heads, oldest row first) are updated in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import constant, sigmoid, silu, softplus
from expertmesh.kernels.kda.chunk import Sequel, kda_chunk, kda_chunks
from expertmesh.kernels.kda.types import CHUNK, KdaSave, KdaSpan

QK_EPS = 1e-6
# Scattered rows whose state is at most this large are gathered first: cheaper than a call each.
GATHER_BYTES = 128 * 1024
# State updated in one go: its four passes should find it in the cache.
STEP_BYTES = 4 << 20

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


def _runs(slots: list[int], longest: int) -> list[tuple[int, int, int]]:
    """Runs of at most `longest` consecutive slots as (first row, end row, first slot)."""
    runs, start = [], 0
    for row in range(1, len(slots) + 1):
        if row - start == longest or row == len(slots) or slots[row] != slots[row - 1] + 1:
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

    A row of slot -1 (padding) touches no state and gives zero.
    Fastest when the rows come in runs of consecutive slots (their state is then never copied) and
    when `conv_weight_CW` is the transpose of a contiguous [W, C].
    """
    rows, heads, dim = z_BHD.shape
    slots = slots_B.tolist()
    if min(slots, default=0) < 0:
        live_B = slots_B >= 0
        out_BHD = z_BHD.new_zeros(rows, heads, dim, dtype=torch.float32)
        if live_B.any():
            out_BHD[live_B] = kda_decode(
                qkv_BC[live_B],
                z_BHD[live_B],
                beta_BH[live_B],
                conv_weight_CW,
                A_log_H,
                dt_bias_HD,
                lower_bound,
                conv_state,
                state,
                slots_B[live_B],
            )
        return out_BHD
    row_bytes = 4 * heads * dim * dim
    runs = _runs(slots, max(1, STEP_BYTES // row_bytes))
    y_BC = _decode_conv(qkv_BC, conv_weight_CW, conv_state, slots_B, slots)
    y_BND = y_BC.view(rows, 3 * heads, dim)
    qk_BND = l2_normalise(y_BND[:, : 2 * heads])
    q_BHD, k_BHD, v_BHD = qk_BND[:, :heads], qk_BND[:, heads:], y_BND[:, 2 * heads :]
    decay_BHD = kda_gate(z_BHD.float(), A_log_H, dt_bias_HD, lower_bound).exp_()
    # Expanded to D so that its rows never end in a scalar tail.
    beta_BHD = sigmoid(beta_BH.float().unsqueeze(-1).expand(rows, heads, dim))
    inputs = (q_BHD, k_BHD, v_BHD, decay_BHD, beta_BHD)
    if len(runs) == 1:
        out_BHD = _decode_step(state[slots[0] : slots[0] + rows], *inputs)
    elif len(runs) > max(4, rows // 4) and row_bytes <= GATHER_BYTES:
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
    slots: list[int],
) -> Tensor:
    """Convolution and SiLU of one new row per slot, float32 [B, C]; shifts the windows."""
    first, count = slots[0], len(slots)
    if slots == list(range(first, first + count)):
        past_BVC = conv_state[first : first + count]
        window_BWC = torch.cat((past_BVC, qkv_BC.unsqueeze(1)), dim=1)
        past_BVC.copy_(window_BWC[:, 1:])
    else:
        past_BVC = conv_state.index_select(0, slots_B)
        window_BWC = torch.cat((past_BVC, qkv_BC.unsqueeze(1)), dim=1)
        conv_state.index_copy_(0, slots_B, window_BWC[:, 1:])
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
    saves: Sequence[KdaSave] = (),
) -> Tensor:
    """Many tokens per sequence. Returns float32 [T, H, D], zero outside the spans.

    Spans are `KdaSpan`s or plain tuples of the same order; those of one slot follow each other.
    saves: copies of its state in between. Every span is cut at absolute multiples
    of 64 and every chunk is computed as 64 rows (missing rows are exact no-ops), so a prefill cut
    at multiples of 64 is bit-identical to one in a single piece.
    """
    rows, heads, dim = z_THD.shape
    out_THD = torch.zeros(rows, heads, dim, dtype=torch.float32)
    kept = dict[int, list[KdaSave]]()
    for save in saves:
        kept.setdefault(save.after, []).append(save)
    numbered = enumerate(map(KdaSpan._make, spans))
    todo = [(number, span) for number, span in numbered if span.row_end > span.row_begin]
    if not todo:
        return out_THD
    low, high = min(s.row_begin for _, s in todo), max(s.row_end for _, s in todo)
    y_TC = qkv_TC.new_zeros(high - low, qkv_TC.shape[1])
    sequels = []
    for number, span in todo:
        begin, end = span.row_begin - low, span.row_end - low
        y_TC[begin:end] = short_conv(
            qkv_TC[span.row_begin : span.row_end], conv_weight_CW, conv_state[span.slot]
        )
        following = kept.get(number, ())
        for save in following:
            save.conv.copy_(conv_state[span.slot])
        copies = [save.state for save in following]
        sequels.append(Sequel(begin, end, span.position % CHUNK, state[span.slot], copies))
    y_TND = y_TC.float().view(high - low, 3 * heads, dim)
    qk_TND = l2_normalise(y_TND[:, : 2 * heads])
    beta_THD = beta_TH[low:high].float().unsqueeze(-1).expand(high - low, heads, dim)
    out_THD[low:high] = kda_chunks(
        qk_TND[:, :heads].mul_(constant(dim**-0.5)),
        qk_TND[:, heads:],
        y_TND[:, 2 * heads :],
        kda_gate(z_THD[low:high].float(), A_log_H, dt_bias_HD, lower_bound),
        sigmoid(beta_THD)[:, :, 0],
        sequels,
    )
    return out_THD
