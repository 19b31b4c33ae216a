"""The router on a GPU: one program per token, its scores in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import dense_rows, launch, power_of_two


@triton.jit
def route_kernel(
    logits,
    bias,
    ids,
    weights,
    stride,
    scaling,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    b_logit = tl.load(logits + row * stride + expert, mask=inside, other=0.0).to(tl.float32)
    b_biased = tl.sigmoid(b_logit) + tl.load(bias + expert, mask=inside, other=0.0).to(tl.float32)

    # One integer orders by score, then by the lower id: float bits as sortable int32 above, the
    # id counted down below. Both zeros are one number, and NaN is the largest, as in torch.
    bits = tl.where(b_biased == 0.0, 0.0, b_biased).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(b_biased != b_biased, 0x7FFFFFFF, bits)
    key = bits.to(tl.int64) * BLOCK + (BLOCK - 1 - expert)
    LOWEST: tl.constexpr = -(1 << 62)
    key = tl.where(inside, key, LOWEST)

    place = tl.arange(0, BLOCK_K)
    b_ids = tl.zeros([BLOCK_K], dtype=tl.int64)
    for k in range(TOP_K):
        best = tl.max(key, 0)
        b_ids = tl.where(place == k, BLOCK - 1 - (best & (BLOCK - 1)), b_ids)
        key = tl.where(key == best, LOWEST, key)
    b_chosen = tl.load(logits + row * stride + b_ids).to(tl.float32)
    b_weights = tl.where(place < TOP_K, tl.sigmoid(b_chosen), 0.0)
    if RENORMALIZE:
        b_weights = b_weights / (tl.sum(b_weights, 0) + 1e-20)
    at = row * TOP_K + place
    tl.store(ids + at, b_ids, mask=place < TOP_K)
    tl.store(weights + at, b_weights * scaling, mask=place < TOP_K)


def route(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """As `torch_ops.route`; of equal scores the lowest id comes first."""
    logits_TE = dense_rows(logits_TE)
    tokens, experts = logits_TE.shape
    device = logits_TE.device
    ids_TK = torch.empty((tokens, top_k), dtype=torch.int64, device=device)
    weights_TK = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    block = power_of_two(experts)
    launch(
        route_kernel,
        (tokens,),
        logits_TE,
        bias_E,
        ids_TK,
        weights_TK,
        logits_TE.stride(0),
        scaling,
        EXPERTS=experts,
        BLOCK=block,
        TOP_K=top_k,
        BLOCK_K=power_of_two(top_k),
        RENORMALIZE=renormalize,
        # A row within one warp needs no shared memory for its `top_k` maxima.
        num_warps=max(1, block // 1024),
    )
    return ids_TK, weights_TK
