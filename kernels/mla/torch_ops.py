"""Latent attention over a paged cache, fast on CPU. The equations are in `reference.py`.

Cache [P * 64, R + r]: one row per token, latent then the shared (never rotated) key part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.mla.types import PAGE, MlaSpan

MIN_ROWS = 4  # CPU matmuls give a row the same bits for any number of rows from 4 up


def _token_rows(pages: Tensor, valid: Tensor) -> Tensor:
    """Cache rows [n, 64] of `pages` [n] of which the first `valid` [n] hold tokens.

    Places behind the last token repeat it: what was never written is never read.
    """
    offset = torch.minimum(torch.arange(PAGE), (valid - 1).unsqueeze(1))
    return offset.add_((pages * PAGE).unsqueeze(1))


def mla_decode(
    q_latent_BHR: Tensor,
    q_rope_BHr: Tensor,
    cache: Tensor,
    page_table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
) -> Tensor:
    """One query per row in the absorbed form. Returns the attended latent [B, H, R] in q's dtype.

    lengths_B >= 1 includes the new token, whose row is already in the cache; entries of page_table_BN
    behind a row's last page are ignored. Sums run per page; pages are added one by one in order.
    """
    batch, heads, rank = q_latent_BHR.shape
    pages_B = (lengths_B + (PAGE - 1)) // PAGE
    row_N = torch.repeat_interleave(torch.arange(batch), pages_B)
    first_B = pages_B.cumsum(0) - pages_B
    index_N = torch.arange(row_N.numel()) - first_B[row_N]
    valid_N = (lengths_B[row_N] - index_N * PAGE).clamp_(max=PAGE)
    rows = _token_rows(page_table_BN[row_N, index_N], valid_N)
    kv_NPC = cache.index_select(0, rows.flatten()).view(-1, PAGE, cache.shape[1]).float()
    q_BHC = torch.cat((q_latent_BHR, q_rope_BHr), dim=-1).float().mul_(scale)
    score_NHP = torch.bmm(q_BHC.index_select(0, row_N), kv_NPC.transpose(1, 2))
    behind_N1P = (torch.arange(PAGE) >= valid_N.unsqueeze(1)).unsqueeze(1)
    score_NHP.masked_fill_(behind_N1P, float("-inf"))
    peak_BH = score_NHP.new_full((batch, heads), float("-inf"))
    peak_BH.scatter_reduce_(0, row_N.unsqueeze(1).expand(-1, heads), score_NHP.amax(-1), "amax")
    prob_NHP = score_NHP.sub_(peak_BH.index_select(0, row_N).unsqueeze(-1)).exp_()
    total_BH = prob_NHP.new_zeros(batch, heads).index_add_(0, row_N, prob_NHP.sum(-1))
    part_NHR = torch.bmm(prob_NHP, kv_NPC[:, :, :rank])
    out_BHR = part_NHR.new_zeros(batch, heads, rank).index_add_(0, row_N, part_NHR)
    return out_BHR.div_(total_BH.unsqueeze(-1)).to(q_latent_BHR.dtype)


def mla_prefill(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    spans: Sequence[MlaSpan],
    scale: float,
) -> Tensor:
    """Causal attention of every span over its whole context in the expanded form.

    Returns [T, H, v] in q's dtype, zero outside the spans. A query at position p always sees a masked key
    extent of ceil((p + 1) / 64) * 64, so its bits do not depend on how the prompt was cut.
    """
    tokens, heads, _ = q_nope_THd.shape
    out_THv = q_nope_THd.new_zeros(tokens, heads, w_v_HvR.shape[1])
    for span in spans:
        if span.row_end > span.row_begin:
            rows = slice(span.row_begin, span.row_end)
            out_THv[rows] = _prefill_span(
                q_nope_THd[rows], q_rope_THr[rows], cache, w_k_HdR, w_v_HvR, span, scale
            )
    return out_THv


def _prefill_span(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    span: MlaSpan,
    scale: float,
) -> Tensor:
    heads, nope, rank = w_k_HdR.shape
    value = w_v_HvR.shape[1]
    end = span.position + q_nope_THd.shape[0]
    pages = span.pages[: (end + PAGE - 1) // PAGE]
    valid = (end - torch.arange(pages.numel()) * PAGE).clamp_(max=PAGE)
    kv_LC = cache.index_select(0, _token_rows(pages, valid).flatten())
    latent_LR, rope_Lr = kv_LC[:, :rank], kv_LC[:, rank:]
    k_LHd = (latent_LR @ w_k_HdR.reshape(-1, rank).t()).view(-1, heads, nope)
    v_HLv = (latent_LR @ w_v_HvR.reshape(-1, rank).t()).view(-1, heads, value).transpose(0, 1)
    k_HLc = torch.cat((k_LHd, rope_Lr.unsqueeze(1).expand(-1, heads, -1)), dim=-1).transpose(0, 1)
    q_HTc = torch.cat((q_nope_THd, q_rope_THr), dim=-1).mul(scale).transpose(0, 1)
    out_HTv = q_nope_THd.new_empty(heads, q_nope_THd.shape[0], value)
    begin = span.position
    while begin < end:
        extent = (begin // PAGE + 1) * PAGE
        stop = min(extent, end)
        low, high = begin - span.position, stop - span.position
        q_HQc = q_HTc[:, low:high]
        if high - low < MIN_ROWS:
            q_HQc = torch.cat(
                (q_HQc, q_HQc.new_zeros(heads, MIN_ROWS - (high - low), q_HQc.shape[2])), dim=1
            )
        score_HQK = torch.bmm(q_HQc, k_HLc[:, :extent].transpose(1, 2)).float()
        position_Q1 = torch.arange(begin, begin + q_HQc.shape[1]).unsqueeze(1)
        score_HQK.masked_fill_(torch.arange(extent) > position_Q1, float("-inf"))
        prob_HQK = torch.softmax(score_HQK, dim=-1).to(v_HLv.dtype)
        out_HTv[:, low:high] = torch.bmm(prob_HQK, v_HLv[:, :extent])[:, : high - low]
        begin = stop
    return out_HTv.transpose(0, 1)
