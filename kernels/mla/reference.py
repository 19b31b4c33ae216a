"""Multi-head latent attention over a paged cache, the equations (k3-model 2.3)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.kernels.mla.types import PAGE, MlaSpan


def _context(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` cache rows of a sequence, float32 [length, R + r]."""
    rows = [int(pages[t // PAGE]) * PAGE + t % PAGE for t in range(length)]
    return cache[rows].float()


def mla_plan(page_table_BN: Tensor, lengths_B: Tensor) -> None:
    """No bookkeeping: `mla_decode` walks the page table itself."""


def mla_decode(
    q_latent_BHR: Tensor,
    q_rope_BHr: Tensor,
    cache: Tensor,
    page_table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    plan: object = None,
) -> Tensor:
    """score_s = (q_latent . latent_s + q_rope . rope_s) * scale;  out = sum_s softmax_s latent_s.

    lengths_B includes the new token, whose row is already in the cache. Returns [B, H, R].

    `plan` is the fast version's and not needed here.
    """
    batch, heads, rank = q_latent_BHR.shape
    out = torch.empty_like(q_latent_BHR)
    for b in range(batch):
        kv = _context(cache, page_table_BN[b], int(lengths_B[b]))
        latent, rope = kv[:, :rank], kv[:, rank:]
        for h in range(heads):
            score = (latent @ q_latent_BHR[b, h].float() + rope @ q_rope_BHr[b, h].float()) * scale
            out[b, h] = (torch.softmax(score, 0) @ latent).to(out.dtype)
    return out


def mla_prefill(
    q_nope_THd: Tensor,
    q_rope_THr: Tensor,
    cache: Tensor,
    w_k_HdR: Tensor,
    w_v_HvR: Tensor,
    spans: Sequence[MlaSpan],
    scale: float,
) -> Tensor:
    """Causal attention with keys and values expanded from the latents.

    k_s[h] = W_K[h] latent_s | rope_s;  v_s[h] = W_V[h] latent_s;  softmax over s <= t in float32.
    Returns [T, H, v], zero outside the spans.
    """
    tokens, heads, _ = q_nope_THd.shape
    rank = w_k_HdR.shape[2]
    out = q_nope_THd.new_zeros(tokens, heads, w_v_HvR.shape[1])
    for span in spans:
        for row in range(span.row_begin, span.row_end):
            position = span.position + row - span.row_begin
            kv = _context(cache, span.pages, position + 1)
            latent, rope = kv[:, :rank], kv[:, rank:]
            for h in range(heads):
                key = latent @ w_k_HdR[h].float().t()
                value = latent @ w_v_HvR[h].float().t()
                score = (
                    key @ q_nope_THd[row, h].float() + rope @ q_rope_THr[row, h].float()
                ) * scale
                out[row, h] = (torch.softmax(score, 0) @ value).to(out.dtype)
    return out


def output_gate(out_TV: Tensor, gate_TV: Tensor) -> Tensor:
    """out * sigmoid(gate), in out's dtype throughout."""
    return out_TV * torch.sigmoid(gate_TV)
