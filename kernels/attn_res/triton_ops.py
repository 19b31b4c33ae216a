"""Attention Residuals on a GPU: a program mixes a token's sources and reads each of them once.

The scores need whole sources, the mix needs all scores: an online softmax rescales the running mix
as groups of sources arrive, so that nothing is read a second time and nothing of the sources' size
is kept. The next group is on its way while one is worked on; one reduction serves all its scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import dense_rows, launch, power_of_two, warps_of


@triton.jit(do_not_specialize=["count"])
def attn_res_mix_kernel(
    sources,
    score_weight,
    norm_weight,
    out,
    count,
    source_stride,
    token_stride,
    eps,
    norm_eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_score_w = tl.load(score_weight + column, mask=inside, other=0.0)
    first = sources + token * token_stride
    source = tl.arange(0, GROUP)
    at = first + source.to(tl.int64)[:, None] * source_stride + column[None, :]
    b_next = tl.load(at, mask=(source < count)[:, None] & inside[None, :], other=0.0)
    b_mix = tl.zeros([BLOCK], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for _ in range(0, count, GROUP):
        b_v = b_next.to(tl.float32)
        there = source < count
        source += GROUP
        at = first + source.to(tl.int64)[:, None] * source_stride + column[None, :]
        b_next = tl.load(at, mask=(source < count)[:, None] & inside[None, :], other=0.0)
        b_sums = tl.sum(tl.join(b_v * b_v, b_v * b_score_w[None, :]), 1)
        b_square, b_product = tl.split(b_sums)
        b_score = b_product * tl.rsqrt(b_square / WIDTH + eps)
        b_score = tl.where(there, b_score, float("-inf"))
        higher = tl.maximum(peak, tl.max(b_score, 0))
        kept = tl.exp(peak - higher)
        b_share = tl.exp(b_score - higher)
        b_mix = b_mix * kept + tl.sum(b_v * b_share[:, None], 0)
        total = total * kept + tl.sum(b_share, 0)
        peak = higher
    b_mix = b_mix / total
    if NORM:
        b_norm_w = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        b_mix = b_mix * tl.rsqrt(tl.sum(b_mix * b_mix, 0) / WIDTH + norm_eps) * b_norm_w
    tl.store(out + token * WIDTH + column, b_mix.to(out.dtype.element_ty), mask=inside)


def attn_res_mix(sources_NTH: Tensor, score_weight_H: Tensor, eps: float = 1e-5) -> Tensor:
    """As `torch_ops.attn_res_mix`: with one source that source itself, nothing is launched."""
    if sources_NTH.shape[0] == 1:
        return sources_NTH[0]
    return _mix(sources_NTH, score_weight_H, None, eps, 0.0)


def attn_res_mix_norm(
    sources_NTH: Tensor,
    score_weight_H: Tensor,
    norm_weight_H: Tensor,
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
) -> Tensor:
    """As `torch_ops.attn_res_mix_norm`, in one launch; the mix itself is never written."""
    return _mix(sources_NTH, score_weight_H, norm_weight_H, eps, norm_eps)


def _mix(
    sources_NTH: Tensor,
    score_weight_H: Tensor,
    norm_weight_H: Tensor | None,
    eps: float,
    norm_eps: float,
) -> Tensor:
    count, tokens, width = sources_NTH.shape
    sources_NTH = dense_rows(sources_NTH)
    out_TH = torch.empty(tokens, width, dtype=sources_NTH.dtype, device=sources_NTH.device)
    block = power_of_two(width)
    launch(
        attn_res_mix_kernel,
        (tokens,),
        sources_NTH,
        score_weight_H,
        norm_weight_H,
        out_TH,
        count,
        *sources_NTH.stride()[:2],
        eps,
        norm_eps,
        WIDTH=width,
        BLOCK=block,
        GROUP=group_of(block, sources_NTH.element_size()),
        NORM=norm_weight_H is not None,
        num_warps=warps_of(block),
    )
    return out_TH


def group_of(block: int, itemsize: int) -> int:
    """Sources per group: two of K3's rows in bfloat16, this group and the next, leave 512 threads
    enough registers; of larger rows one."""
    return 2 if block * itemsize <= 16384 else 1
