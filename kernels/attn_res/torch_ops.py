"""Attention Residuals: softmax over depth sources with a learned query, fast on CPU."""

import torch
from torch import Tensor


def attn_res_mix(sources_NTH: Tensor, score_weight_H: Tensor, eps: float = 1e-5) -> Tensor:
    """Mix N depth sources per token; see `reference.attn_res_mix` for the equation.

    sources_NTH: bank entries first, running sum last, activation dtype. score_weight_H: float32 product of
    norm and projection weights. Returns [T, H] in the sources' dtype. With N = 1 the softmax is 1 and the
    result IS `sources_NTH[0]` (an alias, not a copy).
    """
    if sources_NTH.shape[0] == 1:
        return sources_NTH[0]
    v_NTH = sources_NTH.float()
    square_NT = torch.linalg.vecdot(v_NTH, v_NTH)
    score_NT = (v_NTH * score_weight_H).sum(-1)
    score_NT.mul_(square_NT.div_(v_NTH.shape[-1]).add_(eps).rsqrt_())
    alpha_NT = torch.softmax(score_NT, 0)
    return (v_NTH * alpha_NT.unsqueeze(-1)).sum(0).to(sources_NTH.dtype)
