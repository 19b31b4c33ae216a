"""Attention Residuals, the equation (k3-model 2.1)."""

import torch
from torch import Tensor


def attn_res_mix(sources_NTH: Tensor, score_weight_H: Tensor, eps: float = 1e-5) -> Tensor:
    """Softmax over depth sources with a learned query.

    s_j = sum_d v_j[d] / sqrt(mean(v_j^2) + eps) * w[d];  a = softmax_j(s);  out = sum_j a_j v_j,
    with the RAW v_j. Everything float32, one cast at the end. sources_NTH: bank entries first,
    running sum last.
    """
    count, tokens, _ = sources_NTH.shape
    out_TH = torch.empty_like(sources_NTH[0])
    for t in range(tokens):
        v = [sources_NTH[j, t].float() for j in range(count)]
        scores = [(x / torch.sqrt(x.pow(2).mean() + eps) * score_weight_H).sum() for x in v]
        alpha = torch.softmax(torch.stack(scores), dim=0)
        mixed = sum((a * x for a, x in zip(alpha, v, strict=True)), torch.zeros_like(v[0]))
        out_TH[t] = mixed.to(sources_NTH.dtype)
    return out_TH


def attn_res_mix_norm(
    sources_NTH: Tensor,
    score_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
) -> Tensor:
    """weight * m / sqrt(mean(m^2) + eps) of the mix m, which stays float32 into the norm."""
    mixed_TH = attn_res_mix(sources_NTH.float(), score_weight_H, eps)
    normed_TH = mixed_TH / torch.sqrt(mixed_TH.pow(2).mean(-1, keepdim=True) + norm_eps)
    return (normed_TH * norm_weight_H.float()).to(sources_NTH.dtype)
