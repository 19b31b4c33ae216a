"""Router, gated activation and grouped experts, fast on CPU."""

import torch
from torch import Tensor

from expertmesh.kernels.elementwise import sigmoid, silu
from expertmesh.kernels.latent_moe.types import ExpertWeightsOf, Glu

MIN_ROWS = 4  # CPU matmuls give a row the same bits for any number of rows from 4 up


def route(
    logits_TE: Tensor, bias_E: Tensor, top_k: int, renormalize: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Pick the top-k experts of every token.

    The bias takes part in the selection only. Returns (ids int64 [T, K] by descending biased score,
    weights float32 [T, K] from the unbiased scores).
    """
    scores_TE = sigmoid(logits_TE)
    ids_TK = torch.topk(scores_TE + bias_E, top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    if renormalize:
        weights_TK.div_(weights_TK.sum(-1, keepdim=True).add_(1e-20))
    if scaling != 1.0:
        weights_TK.mul_(scaling)
    return ids_TK, weights_TK


def glu(gate_up_T2I: Tensor, spec: Glu) -> Tensor:
    """Gated activation [T, 2I] -> [T, I]; first half gate, second half up; float32 inside."""
    gate_TI, up_TI = gate_up_T2I.float().chunk(2, dim=-1)
    if spec.kind == "silu":
        return silu(gate_TI).mul_(up_TI).to(gate_up_T2I.dtype)
    act_TI = (gate_TI * (1.0 / spec.beta)).tanh_().mul_(sigmoid(gate_TI))
    if spec.linear_beta is None:
        return act_TI.mul_(up_TI).mul_(spec.beta).to(gate_up_T2I.dtype)
    act_TI.mul_((up_TI * (1.0 / spec.linear_beta)).tanh_())
    return act_TI.mul_(spec.beta * spec.linear_beta).to(gate_up_T2I.dtype)


def experts_partial_sum(
    z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, weights_of: ExpertWeightsOf, spec: Glu
) -> Tensor:
    """Weighted sum over the LOCAL experts of every token.

    ids_TK: local slots, -1 where the expert lives elsewhere. Returns float32 [T, D], zero rows where a
    token has no local expert. Per token the terms are added in the order of its k axis, so the result does
    not depend on slot numbers or on companions.
    """
    tokens, top_k = ids_TK.shape
    flat, order = ids_TK.reshape(-1).sort(stable=True)
    hits, counts = (t.tolist() for t in flat.unique_consecutive(return_counts=True))
    skipped = 0
    if hits and hits[0] < 0:
        hits, skipped, counts = hits[1:], counts[0], counts[1:]
    if not hits:
        return torch.zeros(tokens, z_TD.shape[1], dtype=torch.float32)
    sizes = [max(count, MIN_ROWS) for count in counts]
    rows = sum(sizes)
    # Row of the padded buffer that serves (token, k); non-local pairs share the zero row at the end.
    place: list[int] = []
    start = 0
    for count, size in zip(counts, sizes, strict=True):
        place.extend(range(start, start + count))
        start += size
    place_N = torch.tensor(place)
    order = order[skipped:]
    x_RD = z_TD.new_zeros(rows, z_TD.shape[1])
    x_RD.index_copy_(0, place_N, z_TD.index_select(0, order.div(top_k, rounding_mode="floor")))
    weights = [weights_of(slot) for slot in hits]
    h_R2I = x_RD.new_empty(rows, weights[0][0].shape[0])
    for x, (w13, _), out in zip(x_RD.split(sizes), weights, h_R2I.split(sizes), strict=True):
        torch.mm(x, w13.t(), out=out)
    act_RI = glu(h_R2I, spec)
    y_RD = x_RD.new_empty(rows + 1, x_RD.shape[1])
    y_RD[rows] = 0.0
    for act, (_, w2), out in zip(
        act_RI.split(sizes), weights, y_RD[:rows].split(sizes), strict=True
    ):
        torch.mm(act, w2.t(), out=out)
    row_TK = torch.full((tokens * top_k,), rows).index_copy_(0, order, place_N)
    y_TKD = y_RD.index_select(0, row_TK).view(tokens, top_k, -1).float()
    weights_TK = weights_TK.masked_fill(ids_TK < 0, 0.0)
    return (y_TKD * weights_TK.unsqueeze(-1)).sum(1)
