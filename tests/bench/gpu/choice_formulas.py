"""Router, experts and sampling in float64 (k3-model.md 2.4, 2.6).

Where a result is a choice between nearly equal ones, any of them is right: what is claimed is that
no better one was left out.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.latent_moe.tables import MXFP4, ExpertTable
from tests.bench.gpu.claims import Claim, floating, none_above
from tests.bench.gpu.formulas import activated, mxfp4_values

Args = tuple[Any, ...]
GREEDY_BELOW = 1e-5
# What float32 weights (exp of a float32 quotient) may move a cumulative probability, and the edge
# of what a filter keeps.
MASS, EDGE = 2e-5, 2e-5


def route(args: Args, result: tuple[Tensor, Tensor], _: Args) -> list[Claim]:
    logits, bias, top_k, renormalize, scaling = args
    ids, weights = result
    scores = torch.sigmoid(logits.double())
    biased = scores + bias.double()
    best = torch.topk(biased, top_k, dim=-1).values
    exact = scores.gather(1, ids)
    if renormalize:
        exact = exact / (exact.sum(-1, keepdim=True) + 1e-20)
    ordered = ids.sort(-1).values
    return [
        none_above("chosen twice", (ordered[:, 1:] == ordered[:, :-1]).double(), 0.0),
        none_above("short of the best", best - biased.gather(1, ids), 1e-6),
        floating("weights", weights, exact * scaling, l2=5e-6),
    ]


def experts_partial_sum(args: Args, result: Tensor, _: Args) -> list[Claim]:
    z, ids, weights, weights_of, spec = args
    exact = torch.zeros(z.shape, dtype=torch.float64, device=z.device)
    for expert in ids[ids >= 0].unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        w1, w3, w2 = expert_matrices(weights_of.table(), expert)
        w13 = torch.cat((w1, w3))
        out = activated(z[token].double() @ w13.t(), spec) @ w2.t()
        exact.index_add_(0, token, out * weights[token, place].double().unsqueeze(1))
    # In bfloat16 three roundings in a row: of the gate's input, its result and the term.
    narrow = z.dtype == torch.bfloat16
    return [floating("out", result, exact, l2=6e-3 if narrow else 1e-3)]


def expert_matrices(table: ExpertTable, expert: int) -> list[Tensor]:
    """w1, w3, w2 in float64, from the tensors behind the table: codes and scale, or dense."""
    forms = table.rows[:, 0].tolist()
    parts = [6 if form == MXFP4 else 3 for form in forms]
    slot = int(table.slots_E[expert])
    begin = sum(parts[:slot])
    tensors = table.tensors[begin : begin + parts[slot]]
    if forms[slot] != MXFP4:
        return [x.double() for x in tensors]
    return [mxfp4_values(tensors[i], tensors[i + 1]) for i in (0, 2, 4)]


def sample(args: Args, result: Tensor, _: Args) -> list[Claim]:
    logits, *settings = args
    rows = zip(
        logits.double(), result.tolist(), *(x.double().tolist() for x in settings), strict=True
    )
    off, below = zip(*(_sampled(*row) for row in rows), strict=True)
    return [
        none_above("outside its share", torch.tensor(off, dtype=torch.float64), MASS),
        none_above("kept but filtered", torch.tensor(below, dtype=torch.float64), EDGE),
    ]


def _sampled(
    logits: Tensor,
    chosen: int,
    temperature: float,
    top_k: float,
    top_p: float,
    min_p: float,
    uniform: float,
) -> tuple[float, float]:
    """How far `uniform` is outside the chosen id's part of the cumulative distribution, and how far
    the id's weight is below what the filters keep, relatively."""
    peak = float(logits.max())
    if temperature < GREEDY_BELOW:
        return float(int(logits.argmax()) != chosen), 0.0
    weight = torch.exp((logits - peak) / temperature)
    ordered = weight.sort(descending=True).values
    edge = 0.0
    if 0 < top_k < weight.numel():
        edge = float(ordered[int(top_k) - 1])
        ordered = ordered[ordered >= edge]
    if top_p < 1.0:
        reached = ordered.cumsum(0)
        place = int(torch.searchsorted(reached, top_p * reached[-1]))
        edge = float(ordered[min(place, ordered.numel() - 1)])
    edge = max(edge, min_p)
    kept = torch.where(weight >= edge * (1.0 - EDGE), weight, 0.0)
    total, share = float(kept.sum()), float(weight[chosen])
    begin = float(kept[:chosen].sum())
    outside = max(begin / total - uniform, uniform - (begin + share) / total, 0.0)
    return outside, max(0.0, 1.0 - share / edge) if edge else 0.0
