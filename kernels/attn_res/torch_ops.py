"""Attention Residuals: softmax over depth sources with a learned query, fast on CPU."""

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import constant
from expertmesh.kernels.norm.torch_ops import inverse_rms


def attn_res_mix(sources_NTH: Tensor, score_weight_H: Tensor, eps: float = 1e-5) -> Tensor:
    """Mix N depth sources per token; `reference.attn_res_mix` has the equation.

    sources_NTH: bank entries first, running sum last, activation dtype. score_weight_H: float32
    product of norm and projection weights. Returns [T, H] in the sources' dtype. With N = 1 the
    softmax is 1 and the result IS `sources_NTH[0]` (an alias, not a copy).
    """
    if sources_NTH.shape[0] == 1:
        return sources_NTH[0]
    v_NTH = sources_NTH.float()
    norm_NT = torch.linalg.vector_norm(v_NTH, dim=-1)
    score_NT = torch.linalg.vecdot(v_NTH, score_weight_H)
    mean_square_NT = torch.addcmul(constant(eps), norm_NT, norm_NT, value=1.0 / v_NTH.shape[-1])
    score_NT.mul_(mean_square_NT.rsqrt_())
    # Softmax and sum over the FIRST axis would vectorise across tokens, and a token's bits would
    # then depend on its column; over the last axis every token is computed alone.
    alpha_T1N = torch.softmax(score_NT.t(), -1).unsqueeze(1)
    mixed_T1H = torch.bmm(alpha_T1N, v_NTH.transpose(0, 1))
    return mixed_T1H.squeeze(1).to(sources_NTH.dtype)


def attn_res_mix_norm(
    sources_NTH: Tensor,
    score_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
) -> Tensor:
    """The mix and the RMSNorm that follows it, in one operator; float32 from end to end.

    Nothing of the sources' size is written: the scores are one product per token, and the norm
    works in place on the mix. Both products take each token alone, so its bits do not depend on
    its companions. Returns [T, H] in the sources' dtype.
    """
    count, tokens, width = sources_NTH.shape
    v_NTH = sources_NTH.float()
    if count == 1:
        normed_TH = torch.mul(v_NTH[0], inverse_rms(v_NTH[0], norm_eps))
    else:
        v_THN = v_NTH.permute(1, 2, 0)
        norm_T1N = torch.linalg.vector_norm(v_THN, dim=1, keepdim=True)
        mean_square_T1N = torch.addcmul(constant(eps), norm_T1N, norm_T1N, value=1.0 / width)
        score_T1N = torch.bmm(score_weight_H.expand(tokens, 1, width), v_THN)
        alpha_T1N = torch.softmax(score_T1N.mul_(mean_square_T1N.rsqrt_()), -1)
        normed_TH = torch.bmm(alpha_T1N, v_THN.mT).squeeze(1)
        normed_TH.mul_(inverse_rms(normed_TH, norm_eps))
    return normed_TH.mul_(norm_weight_H).type_as(sources_NTH)
