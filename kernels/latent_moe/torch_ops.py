"""Router, gated activation and grouped experts, fast on CPU."""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from expertmesh.kernels.elementwise import constant, sigmoid, silu
from expertmesh.kernels.latent_moe.grouped import multiply_all
from expertmesh.kernels.latent_moe.types import ExpertWeightsOf, Glu
from expertmesh.kernels.linear.half import HalfMatrix, full_row_counts, native_bf16
from expertmesh.kernels.linear.torch_ops import MIN_ROWS

# Padding of at most this many elements is activated along with the rest: cheaper than moving rows.
FEW_ELEMENTS = 1 << 12

__all__ = ["ExpertWeightsOf", "Glu", "experts_partial_sum", "glu", "route"]


def route(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Pick the top-k experts of every token.

    The bias takes part in the selection only. Returns (ids int64 [T, K] by descending biased
    score, weights float32 [T, K] from the unbiased scores).
    """
    scores_TE = sigmoid(logits_TE)
    ids_TK = torch.topk(torch.add(scores_TE, bias_E), top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK.div_(weights_TK.sum(-1, keepdim=True).add_(constant(1e-20)))
    if scaling != 1.0:
        weights_TK.mul_(constant(scaling))
    return ids_TK, weights_TK


@cache
def _inverse_betas(half: int, beta: float, linear_beta: float) -> Tensor:
    """[2I] divisors of the gate and the up half, as factors."""
    with torch.inference_mode(False):
        return torch.tensor([1.0 / beta, 1.0 / linear_beta]).repeat_interleave(half)


def glu(gate_up_T2I: Tensor, spec: Glu) -> Tensor:
    """Gated activation [T, 2I] -> [T, I]; first half gate, second half up; float32 inside."""
    half = gate_up_T2I.shape[-1] // 2
    x_T2I = gate_up_T2I.float()
    gate_TI = x_T2I[..., :half]
    if spec.kind == "silu":
        out_TI = silu(gate_TI).mul_(x_T2I[..., half:])
    elif spec.linear_beta is None:
        out_TI = torch.tanh(gate_TI * (1.0 / spec.beta)).mul_(x_T2I[..., half:])
        out_TI.mul_(sigmoid(gate_TI)).mul_(constant(spec.beta))
    else:
        # tanh(gate / b1) and tanh(up / b2) in one pass; b1 b2 multiplies the product.
        soft_T2I = torch.mul(x_T2I, _inverse_betas(half, spec.beta, spec.linear_beta)).tanh_()
        out_TI = torch.mul(soft_T2I[..., :half], soft_T2I[..., half:])
        out_TI.mul_(sigmoid(gate_TI)).mul_(constant(spec.beta * spec.linear_beta))
    return out_TI.type_as(gate_up_T2I)


def experts_partial_sum(
    z_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    weights_of: ExpertWeightsOf,
    spec: Glu,
    *,
    sum_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Weighted sum over the LOCAL experts of every token.

    ids_TK: expert numbers as `weights_of` knows them, -1 where the expert lives elsewhere (its
    weight is ignored). Returns `sum_dtype` [T, D], zero rows where a token has no local expert.
    The terms of a token are float32 and added in the order of its k axis: the bits depend neither
    on the numbers nor on companions. Added in float64 they do not depend on that order either,
    so partial sums of any split of the experts add up to the same float32.
    """
    if z_TD.dtype == torch.bfloat16 and not native_bf16():
        # Whatever an expert is kept as: else companions whose experts are kept in float16, which
        # multiply in float32, would decide in what the others do.
        z_TD = z_TD.float()
    tokens, top_k = ids_TK.shape
    # Index bookkeeping in numpy: its calls on small arrays cost a third of torch's.
    flat = ids_TK.reshape(-1).numpy()
    counts = np.bincount(flat + 1, minlength=1)
    skipped = int(counts[0])
    if skipped == flat.size:
        return torch.zeros(tokens, z_TD.shape[1], dtype=sum_dtype)
    order = flat.argsort(kind="stable")[skipped:]
    hits = counts[1:].nonzero()[0]
    counts = counts[1:][hits]
    kept = getattr(weights_of, "matrices", None)  # as they are kept for products, all at once
    matrices = [*map(weights_of, hits.tolist())] if kept is None else kept(hits.tolist())
    kinds = {type(matrix) for pair in matrices for matrix in pair}
    sizes = counts if kinds == {HalfMatrix} else np.maximum(counts, MIN_ROWS)
    if HalfMatrix in kinds:
        sizes = full_row_counts(sizes)
    ends = sizes.cumsum()
    rows = int(ends[-1])
    # place: row of the padded, expert-sorted buffer that serves the n-th sorted (token, k) pair.
    pairs = np.arange(order.size)
    place = pairs + (ends - sizes - counts.cumsum() + counts).repeat(counts)
    source = np.zeros(rows, np.int64)  # padding rows repeat some other row
    source[place] = order // top_k
    serving = np.full(flat.size, rows)  # non-local pairs read the zero row behind the results
    serving[order] = place

    x_RD = z_TD.index_select(0, torch.from_numpy(source))
    h_R2I = x_RD.new_empty(rows, matrices[0][0].shape[0])
    split = sizes.tolist()
    multiply_all(x_RD, [w13 for w13, _ in matrices], split, h_R2I)
    if (rows - order.size) * h_R2I.shape[1] <= FEW_ELEMENTS:
        act_RI = glu(h_R2I, spec)
    else:  # its functions cost more than moving rows
        back = np.zeros(rows, np.int64)
        back[place] = pairs
        act_PI = glu(h_R2I.index_select(0, torch.from_numpy(place)), spec)
        act_RI = act_PI.index_select(0, torch.from_numpy(back))
    y_RD = x_RD.new_empty(rows + 1 if skipped else rows, x_RD.shape[1])
    if skipped:
        y_RD[rows].zero_()
    multiply_all(act_RI, [w2 for _, w2 in matrices], split, y_RD[:rows] if skipped else y_RD)
    y_TKD = y_RD.index_select(0, torch.from_numpy(serving)).view(tokens, top_k, -1).float()
    if skipped:
        weights_TK = weights_TK.masked_fill(ids_TK < 0, 0.0)
    return y_TKD.mul_(weights_TK.unsqueeze(-1)).sum(1, dtype=sum_dtype)
