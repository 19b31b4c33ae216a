"""Sampling from logits, fast on CPU. Rows never influence each other."""

import torch
from torch import Tensor

from expertmesh.kernels.sampling.philox import counter_uniform

GREEDY_BELOW = 1e-5  # temperatures below it are argmax: any float32 gap becomes certainty
NUCLEUS_TRIES = (64, 512)  # sorted prefixes tried before a full sort
BLOCK = 64  # ids per block of the two-level cumulative sum

__all__ = ["GREEDY_BELOW", "counter_uniform", "log_probs", "sample"]


def log_probs(logits_BV: Tensor) -> Tensor:
    """float32 log-softmax of every row; -inf logits stay -inf."""
    return torch.log_softmax(logits_BV.float(), dim=-1)


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    uniform_B: Tensor,
) -> Tensor:
    """One token id per row, int64 [B].

    Filters in order: temperature, top_k (<= 0 or >= V: off), top_p (>= 1: off), min_p (<= 0: off;
    relative to the largest probability). Ids tied with the last kept one are all kept, by top_k
    and by top_p. The draw is the inverse of the cumulative distribution in id order at
    `uniform_B` in [0, 1). A temperature below GREEDY_BELOW takes the lowest id among the largest
    logits, and so does a row without a finite maximum (all -inf, or any +inf or NaN).
    """
    drawn = [row for row, t in enumerate(temperature_B.tolist()) if t >= GREEDY_BELOW]
    if not drawn:
        return logits_BV.argmax(-1)
    peak_B1 = logits_BV.amax(-1, keepdim=True)
    finite = peak_B1.isfinite().squeeze(1).tolist()
    drawn = [row for row in drawn if finite[row]]
    if len(drawn) == len(logits_BV):
        return _draw(logits_BV, peak_B1, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
    ids_B = logits_BV.argmax(-1)
    if drawn:
        rows = torch.tensor(drawn)
        settings = (logits_BV, peak_B1, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
        ids_B[rows] = _draw(*(x.index_select(0, rows) for x in settings))
    return ids_B


def _draw(
    logits_RV: Tensor,
    peak_R1: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    uniform_R: Tensor,
) -> Tensor:
    """The stochastic rows; every row has a finite largest logit."""
    gap_RV = torch.sub(logits_RV, peak_R1).float()
    # The largest weight of a row is exactly 1, whatever the temperature.
    weight_RV = gap_RV.div_(temperature_R.float().unsqueeze(1)).exp_()
    for row, k in enumerate(top_k_R.tolist()):
        if 0 < k < weight_RV.shape[1]:
            threshold = weight_RV[row].topk(k).values[-1]
            weight_RV[row].masked_fill_(weight_RV[row] < threshold, 0.0)
    for row, p in enumerate(top_p_R.tolist()):
        if p < 1.0:
            weight_RV[row].masked_fill_(weight_RV[row] < _nucleus_edge(weight_RV[row], p), 0.0)
    for row, p in enumerate(min_p_R.tolist()):
        if p > 0.0:
            weight_RV[row].masked_fill_(weight_RV[row] < p, 0.0)
    return _inverse_cdf(weight_RV, uniform_R)


def _nucleus_edge(weight_V: Tensor, top_p: float) -> Tensor:
    """Smallest weight of the smallest set of largest weights whose share reaches top_p."""
    goal = top_p * float(weight_V.sum(dtype=torch.float64))
    for size in (*NUCLEUS_TRIES, weight_V.shape[0]):
        ordered = weight_V.topk(min(size, weight_V.shape[0])).values
        reached = ordered.cumsum(0, dtype=torch.float64)
        count = int(torch.searchsorted(reached, goal))  # number of sums below the goal
        if count < len(ordered):
            break
    return ordered[min(count, len(ordered) - 1)]


def _inverse_cdf(weight_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """First id whose cumulative weight exceeds uniform * total; it always has a positive weight.

    Sums are float64 (a float32 running sum rounds the tail of a large vocabulary away), over
    blocks first: a full cumulative sum of every row would dominate the step.
    """
    rows, vocabulary = weight_RV.shape
    if vocabulary % BLOCK:
        weight_RV = torch.nn.functional.pad(weight_RV, (0, BLOCK - vocabulary % BLOCK))
    blocks_RNB = weight_RV.view(rows, -1, BLOCK)
    reached_RN = blocks_RNB.sum(-1, dtype=torch.float64).cumsum(-1)
    target_R1 = uniform_R.double().unsqueeze(1) * reached_RN[:, -1:]
    block_R1 = _first_above(reached_RN, target_R1)
    before_R1 = torch.where(block_R1 > 0, reached_RN.gather(1, (block_R1 - 1).clamp_(min=0)), 0.0)
    inside_RB = blocks_RNB[torch.arange(rows), block_R1.squeeze(1)].cumsum(-1, dtype=torch.float64)
    return (block_R1 * BLOCK + _first_above(inside_RB, target_R1 - before_R1)).squeeze(1)


def _first_above(reached_RN: Tensor, target_R1: Tensor) -> Tensor:
    """First position whose running sum exceeds the target, clamped to where the sum grows."""
    last_R1 = reached_RN[:, -1:]
    highest_R1 = torch.nextafter(last_R1, torch.zeros_like(last_R1))
    target_R1 = torch.minimum(target_R1.clamp(min=0.0), highest_R1)
    return torch.searchsorted(reached_RN, target_R1.contiguous(), right=True)
