"""Sampling, the definition, one row and one id at a time in float64."""

import math

import torch
from torch import Tensor

from expertmesh.kernels.sampling.philox import counter_uniform

GREEDY_BELOW = 1e-5

__all__ = ["counter_uniform", "log_probs", "sample"]


def log_probs(logits_BV: Tensor) -> Tensor:
    """logits - log(sum(exp(logits))) of every row, float32."""
    x = logits_BV.double()
    peak = x.amax(-1, keepdim=True)
    return (x - peak - torch.log(torch.exp(x - peak).sum(-1, keepdim=True))).float()


def sample(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    uniform_B: Tensor,
) -> Tensor:
    """temperature, top_k, top_p, min_p, then the inverse CDF in id order; ids int64 [B].

    Ids tied with the last kept one are all kept. Rows are independent.
    """
    settings = zip(
        logits_BV.float().tolist(),
        temperature_B.tolist(),
        top_k_B.tolist(),
        top_p_B.tolist(),
        min_p_B.tolist(),
        uniform_B.tolist(),
        strict=True,
    )
    return torch.tensor([_sample_row(*row) for row in settings], dtype=torch.int64)


def _sample_row(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    peak = max(logits)
    if temperature < GREEDY_BELOW or not math.isfinite(peak):
        return logits.index(peak)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])  # stable: ties lowest id first
    if 0 < top_k < len(weights):
        threshold = weights[order[top_k - 1]]
        weights = [w if w >= threshold else 0.0 for w in weights]
    if top_p < 1.0:
        goal, reached = top_p * math.fsum(weights), 0.0
        for i in order:
            edge = weights[i]
            reached += edge
            if reached >= goal:
                break
        weights = [w if w >= edge else 0.0 for w in weights]
    weights = [w if w >= min_p else 0.0 for w in weights]
    target, running = uniform * sum(weights), 0.0
    for i, w in enumerate(weights):
        running += w
        if running > target:
            return i
    return max(i for i, w in enumerate(weights) if w > 0.0)
