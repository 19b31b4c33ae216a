"""Prefill of few rows over a long context in the absorbed form: nothing of it is expanded.

    score_s = (W_K^T q_n . latent_s + q_r . rope_s) * scale;  out = W_V sum_s softmax_s latent_s

which is the expanded form with its products in another order (k3-model 2.3). A row costs more so
(K3: 1,088 multiply-adds a key and head against 320), but no key costs 131,072 of them a head first.

Q rows of one page of positions, M = H * Q; K keys at a time, at absolute positions, so that the
bits of a row depend neither on its companions nor on where its span was cut.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.kernels.linear.torch_ops import MIN_ROWS
from expertmesh.kernels.mla.plan import context_rows
from expertmesh.kernels.mla.types import PAGE, MlaSpan

# With several threads, products of 5 to 11 rows have other last bits than those of more.
LEAST_PRODUCT = 12
# Keys at a time: what stays in a CPU's cache, and what keeps a GPU busy (K3: 0.4 GB of scores).
KEYS, GPU_KEYS = 1 << 10, 1 << 14


def prefill_absorbed(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    span: MlaSpan,
    scale: float,
) -> Tensor:
    """Causal attention of the T rows of one span, all of which count as its tail. [T, H, v] in q's
    dtype; softmax and sums in float32."""
    tokens, heads, _ = q_nope_THd.shape
    rank, begin, end = w_k_HdR.shape[2], span.position, span.position + tokens
    rows_L = context_rows(span.pages.to(cache.device), end)
    out_THv = q_nope_THd.new_empty(tokens, heads, w_v_HvR.shape[1])
    while begin < end:
        extent = (begin // PAGE + 1) * PAGE
        stop = min(extent, end)
        some = slice(begin - span.position, stop - span.position)
        count = stop - begin
        least = max(MIN_ROWS, -(-LEAST_PRODUCT // heads))
        q_HQd = _padded(q_nope_THd[some].transpose(0, 1), least)
        q_HQr = _padded(q_rope_THr[some].transpose(0, 1), least)
        q_HQC = torch.cat((torch.bmm(q_HQd, w_k_HdR), q_HQr), dim=-1)
        ahead_QP = _ahead(begin, q_HQC.shape[1], extent, cache.device)
        latent_MR = _attend(q_HQC * scale, cache, rows_L[:extent], ahead_QP, rank)
        latent_HQR = latent_MR.view(heads, -1, rank).type_as(q_HQC)
        out_HQv = torch.bmm(latent_HQR, w_v_HvR.transpose(1, 2))
        out_THv[some] = out_HQv[:, :count].transpose(0, 1)
        begin = stop
    return out_THv


def _padded(q_HQc: Tensor, rows: int) -> Tensor:
    """With rows of zeros, so that there are at least so many."""
    return F.pad(q_HQc, (0, 0, 0, max(0, rows - q_HQc.shape[1])))


def _ahead(begin: int, rows: int, extent: int, device: torch.device) -> Tensor:
    """Which keys of the last page are ahead of the queries at begin, begin + 1, ...: [Q, 64]."""
    query_Q1 = torch.arange(begin, begin + rows, device=device).unsqueeze(1)
    return torch.arange(extent - PAGE, extent, device=device) > query_Q1


def _attend(q_HQC: Tensor, cache: Tensor, rows_L: Tensor, ahead_QP: Tensor, rank: int) -> Tensor:
    """The attended latents [M, R], float32. rows_L: cache rows of whole pages."""
    heads, queries, width = q_HQC.shape
    q_MC = q_HQC.reshape(-1, width)
    keys = GPU_KEYS if cache.is_cuda else KEYS
    peak_M1 = torch.full((len(q_MC), 1), float("-inf"), device=cache.device)
    total_M1 = torch.zeros_like(peak_M1)
    out_MR = torch.zeros(len(q_MC), rank, device=cache.device)
    for at in range(0, len(rows_L), keys):
        kv_KC = cache.index_select(0, rows_L[at : at + keys])
        score_MK = _product(q_MC, kv_KC.t())
        if at + keys >= len(rows_L):
            last_HQP = score_MK.view(heads, queries, -1)[:, :, -PAGE:]
            last_HQP.masked_fill_(ahead_QP, float("-inf"))
        higher_M1 = torch.maximum(peak_M1, score_MK.amax(-1, keepdim=True))
        prob_MK = score_MK.sub_(higher_M1).exp_()
        fade_M1 = peak_M1.sub_(higher_M1).exp_()
        total_M1.mul_(fade_M1).add_(prob_MK.sum(-1, keepdim=True))
        out_MR.mul_(fade_M1).add_(_product(prob_MK, kv_KC[:, :rank]))
        peak_M1 = higher_M1
    return out_MR.div_(total_M1)


def _product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """In float32. On a GPU of 16-bit numbers, as its attention kernels do it: there the units for
    float32 are several times slower."""
    if b_KN.is_cuda and b_KN.dtype != torch.float32:
        return torch.mm(a_MK.type_as(b_KN), b_KN, out_dtype=torch.float32)
    return torch.mm(a_MK.float(), b_KN.float())
