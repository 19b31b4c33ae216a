"""Latent attention over a paged cache, fast on CPU; prefill also on a GPU, with torch's attention.

The equations are in `reference.py`.

Cache [P * 64, R + r]: one row per token, latent then the shared (never rotated) key part.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from expertmesh.kernels.elementwise import sigmoid
from expertmesh.kernels.linear.torch_ops import MIN_ROWS
from expertmesh.kernels.mla.absorbed import prefill_absorbed
from expertmesh.kernels.mla.plan import DecodePlan, context_rows, plan_decode
from expertmesh.kernels.mla.types import PAGE, MlaSpan

GROUP_BYTES = 1 << 20  # pages gathered at a time: stays in cache, reuses the same memory
EXPANDED_BYTES = 1 << 29  # keys and values expanded at a time on a GPU

__all__ = ["DecodePlan", "MlaSpan", "mla_decode", "mla_plan", "mla_prefill", "output_gate"]


def mla_plan(page_table_BN: Tensor, lengths_B: Tensor) -> DecodePlan:
    """What `mla_decode` takes as `plan`: the bookkeeping that all layers of a step share."""
    return plan_decode(page_table_BN, lengths_B)


def mla_decode(
    q_latent_BHR: Tensor,
    q_rope_BHr: Tensor,
    cache: Tensor,
    page_table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    plan: DecodePlan | None = None,
) -> Tensor:
    """One query per row in the absorbed form. Returns the attended latent [B, H, R] in q's dtype.

    lengths_B includes the new token, whose row is already in the cache; a row of length 0 (padding)
    gives zeros. Entries of the page table behind a row's last page are ignored. `plan` =
    mla_plan(page_table_BN, lengths_B) saves the bookkeeping when several layers share it. Softmax
    and sum run per page; pages are then combined one by one in order, so the padding of a
    companion's table changes nothing.
    """
    if plan is None:
        plan = plan_decode(page_table_BN, lengths_B)
    batch, heads, rank = q_latent_BHR.shape
    width = cache.shape[1]
    q_BHC = torch.cat((q_latent_BHR, q_rope_BHr), dim=-1).float()
    q_NHC = q_BHC if plan.single else q_BHC.index_select(0, plan.row_N)
    pages = q_NHC.shape[0]
    group = max(1, GROUP_BYTES // (4 * PAGE * width))
    if pages <= group:
        peak_NH1, total_NH1, part_NHR = _attend(q_NHC, cache, plan, slice(None), rank, scale)
    else:
        parts = [
            _attend(q_NHC[i : i + group], cache, plan, slice(i, i + group), rank, scale)
            for i in range(0, pages, group)
        ]
        peak_NH1, total_NH1, part_NHR = (torch.cat(x) for x in zip(*parts, strict=True))
    if plan.single:
        return part_NHR.div_(total_NH1).type_as(q_latent_BHR)
    peak_NH = peak_NH1.squeeze(-1)
    highest_BH = peak_NH.new_full((batch, heads), float("-inf"))
    owner_NH = plan.row_N.unsqueeze(1).expand(pages, heads)
    highest_BH.scatter_reduce_(0, owner_NH, peak_NH, "amax")
    share_NH1 = peak_NH.sub_(highest_BH.index_select(0, plan.row_N)).exp_().unsqueeze(-1)
    out_BHR = part_NHR.new_zeros(batch, heads, rank)
    out_BHR.index_add_(0, plan.row_N, part_NHR.mul_(share_NH1))
    total_BH1 = part_NHR.new_zeros(batch, heads, 1)
    total_BH1.index_add_(0, plan.row_N, total_NH1.mul_(share_NH1))
    if plan.padded:
        total_BH1.masked_fill_(total_BH1 == 0, 1.0)
    return out_BHR.div_(total_BH1).type_as(q_latent_BHR)


def _attend(
    q_NHC: Tensor, cache: Tensor, plan: DecodePlan, chosen: slice, rank: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised attention within single pages: (peak [N,H,1], total [N,H,1], sum [N,H,R])."""
    rows = plan.rows_NP[chosen].flatten()
    kv_NPC = cache.index_select(0, rows).view(-1, PAGE, cache.shape[1]).float()
    bias_N1P = plan.bias_N1P[chosen]
    score_NHP = torch.baddbmm(bias_N1P, q_NHC, kv_NPC.transpose(1, 2), alpha=scale)
    peak_NH1 = score_NHP.amax(-1, keepdim=True)
    prob_NHP = score_NHP.sub_(peak_NH1).exp_()
    return peak_NH1, prob_NHP.sum(-1, keepdim=True), torch.bmm(prob_NHP, kv_NPC[:, :, :rank])


def mla_prefill(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    spans: Sequence[MlaSpan],
    scale: float,
) -> Tensor:
    """Causal attention of every span over its whole context.

    In the expanded form, which is the faster one for many rows; from a span's tail on in the
    absorbed form, which is for few: what is expanded serves all rows of a span, however few they
    are, and after a prefix hit that would be nearly all of the work.

    Returns [T, H, v] in q's dtype, zero outside the spans. On a CPU a query at position p always
    sees a masked key extent of ceil((p + 1) / 64) * 64, so its bits do not depend on how the prompt
    was cut. On a GPU torch's attention cuts the keys as it likes.
    """
    tokens, heads, _ = q_nope_THd.shape
    out_THv = q_nope_THd.new_zeros(tokens, heads, w_v_HvR.shape[1])
    for span in spans:
        for attend, part in _by_form(span, on_cpu=cache.device.type == "cpu"):
            rows = slice(part.row_begin, part.row_end)
            q = q_nope_THd[rows], q_rope_THr[rows]
            out_THv[rows] = attend(*q, cache, w_k_HdR, w_v_HvR, part, scale)
    return out_THv


def _by_form(span: MlaSpan, on_cpu: bool) -> list[tuple[Callable[..., Tensor], MlaSpan]]:
    """The parts of a span that have rows, each with what computes it."""
    tail = span.row_begin + max(0, span.tail - span.position)
    cut = min(tail, span.row_end)
    below = span._replace(row_end=cut)
    behind = span._replace(row_begin=cut, position=span.position + cut - span.row_begin)
    forms = (_prefill_span if on_cpu else _prefill_span_fused, below), (prefill_absorbed, behind)
    return [(attend, part) for attend, part in forms if part.row_begin < part.row_end]


def _prefill_span(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    span: MlaSpan,
    scale: float,
) -> Tensor:
    """One span: expand keys and values of its context, then one block of 64 positions at a time."""
    tokens, heads, _ = q_nope_THd.shape
    rank, value = w_k_HdR.shape[2], w_v_HvR.shape[1]
    end = span.position + tokens
    kv_LC = cache.index_select(0, context_rows(span.pages, end))
    k_HcL = _expand_keys(kv_LC, w_k_HdR)
    v_HLv = (kv_LC[:, :rank] @ w_v_HvR.reshape(-1, rank).t()).view(-1, heads, value).transpose(0, 1)
    q_HTc = torch.cat((q_nope_THd, q_rope_THr), dim=-1).mul_(scale).transpose(0, 1)
    out_HTv = q_nope_THd.new_empty(heads, tokens, value)
    begin = span.position
    while begin < end:
        extent = (begin // PAGE + 1) * PAGE
        stop = min(extent, end)
        low, high = begin - span.position, stop - span.position
        q_HQc = q_HTc[:, low:high]
        if high - low < MIN_ROWS:
            padding = q_HQc.new_zeros(heads, MIN_ROWS - (high - low), q_HQc.shape[2])
            q_HQc = torch.cat((q_HQc, padding), dim=1)
        score_HQK = torch.bmm(q_HQc, k_HcL[:, :, :extent]).float()
        # Only the last block of keys is partly ahead of a query.
        query_Q1 = torch.arange(begin, begin + q_HQc.shape[1]).unsqueeze(1)
        ahead_QP = torch.arange(extent - PAGE, extent) > query_Q1
        score_HQK[:, :, extent - PAGE :].masked_fill_(ahead_QP, float("-inf"))
        prob_HQK = torch.softmax(score_HQK, dim=-1).to(v_HLv.dtype)
        out_HTv[:, low:high] = torch.bmm(prob_HQK, v_HLv[:, :extent])[:, : high - low]
        begin = stop
    return out_HTv.transpose(0, 1)


def _expand_keys(kv_LC: Tensor, w_k_HdR: Tensor) -> Tensor:
    """Keys of all heads, [H, d + r, L]. Products go where they stay: to join them with the shared
    part would move all of them once more."""
    heads, nope, rank = w_k_HdR.shape
    k_HLc = kv_LC.new_empty(heads, kv_LC.shape[0], nope + kv_LC.shape[1] - rank)
    latent_LR = kv_LC[:, :rank]
    for k_Lc, w_k_dR in zip(k_HLc, w_k_HdR, strict=True):
        torch.mm(latent_LR, w_k_dR.t(), out=k_Lc[:, :nope])
    k_HLc[:, :, nope:] = kv_LC[:, rank:]
    return k_HLc.transpose(1, 2)


def _prefill_span_fused(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    span: MlaSpan,
    scale: float,
) -> Tensor:
    """One span with torch's fused attention, a few heads at a time: keys and values of all heads
    would be 85 times as large as the latents they come from."""
    q_THc = torch.cat((q_nope_THd, q_rope_THr), dim=-1)
    tokens, heads, width = q_THc.shape
    end, rank = span.position + tokens, w_k_HdR.shape[2]
    value = w_v_HvR.shape[1]
    kv_LC = cache.index_select(0, context_rows(span.pages.to(cache.device), end)[:end])
    latent_LR, rope_L1r = kv_LC[:, :rank], kv_LC[:, rank:].unsqueeze(1)
    # The fused kernels want values as wide as keys: zeros, appended where latents are expanded.
    w_v_HcR = F.pad(w_v_HvR, (0, 0, 0, max(0, width - value)))
    group = max(1, EXPANDED_BYTES // (2 * end * width * cache.element_size()))
    causal = causal_lower_right(tokens, end)
    out_THv = q_THc.new_empty(tokens, heads, value)
    for i in range(0, heads, group):
        w_k_GdR, w_v_GcR = w_k_HdR[i : i + group], w_v_HcR[i : i + group]
        some = w_k_GdR.shape[0]
        k_LGd = (latent_LR @ w_k_GdR.reshape(-1, rank).t()).view(end, some, -1)
        k_LGc = torch.cat((k_LGd, rope_L1r.expand(-1, some, -1)), dim=-1)
        v_LGc = (latent_LR @ w_v_GcR.reshape(-1, rank).t()).view(end, some, -1)
        q_TGc = q_THc[:, i : i + group]
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_TGc, k_LGc, v_LGc))
        out_1GTc = F.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=scale)
        out_THv[:, i : i + group] = out_1GTc[0, :, :, :value].transpose(0, 1)
    return out_THv


def output_gate(out_TV: Tensor, gate_TV: Tensor) -> Tensor:
    """The attended values times their gate's sigmoid (k3-model 2.3). New tensor, out's dtype."""
    return out_TV * sigmoid(gate_TV)
