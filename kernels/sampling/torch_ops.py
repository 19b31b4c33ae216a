"""Sampling from logits, fast on CPU. Rows never influence each other."""

import torch
from torch import Tensor

from expertmesh.kernels.sampling.philox import counter_uniform

GREEDY_BELOW = 1e-5  # temperatures below it are argmax: the softmax is one-hot for any float32 gap

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

    Filters in order: temperature, top_k (<= 0 or >= V: off), top_p (>= 1: off), min_p (<= 0: off). Ties at
    the top_k threshold are all kept; ties at the top_p cut are kept lowest id first. The draw is the inverse
    of the cumulative distribution in id order at `uniform_B` in [0, 1). Temperature below GREEDY_BELOW takes
    the lowest id among the largest logits, and so does a row without a finite maximum (all -inf, +inf, NaN).
    """
    greedy_B = logits_BV.argmax(-1)
    drawn = ((temperature_B >= GREEDY_BELOW) & logits_BV.amax(-1).isfinite()).nonzero().squeeze(1)
    if drawn.numel() == 0:
        return greedy_B
    logits_RV = logits_BV.index_select(0, drawn).float()
    logits_RV.sub_(logits_RV.amax(-1, keepdim=True)).div_(temperature_B[drawn].unsqueeze(1))
    weight_RV = logits_RV.exp_()  # the largest weight of every row is exactly 1
    _keep_top_k(weight_RV, top_k_B[drawn])
    _keep_top_p(weight_RV, top_p_B[drawn])
    min_p_R = min_p_B[drawn].to(weight_RV.dtype).unsqueeze(1)
    weight_RV.masked_fill_(weight_RV < min_p_R, 0.0)
    # float64: a float32 running sum would round tail tokens of a large vocabulary away.
    cumulative_RV = weight_RV.cumsum(-1, dtype=torch.float64)
    total_R1 = cumulative_RV[:, -1:]
    target_R1 = uniform_B[drawn].double().unsqueeze(1) * total_R1
    # Stay below the total even when the product rounds up, so an id with a positive weight is found.
    target_R1 = torch.minimum(target_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    picked_R = torch.searchsorted(cumulative_RV, target_R1, right=True).squeeze(1)
    return greedy_B.index_copy(0, drawn, picked_R)


def _keep_top_k(weight_RV: Tensor, top_k_R: Tensor) -> None:
    """Zero the weights below the k-th largest of their row."""
    vocabulary = weight_RV.shape[1]
    rows = ((top_k_R > 0) & (top_k_R < vocabulary)).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    k_R = top_k_R[rows].long()
    largest = weight_RV[rows].topk(int(k_R.max()), dim=-1).values
    threshold = largest.gather(1, (k_R - 1).unsqueeze(1))
    weight_RV[rows] = weight_RV[rows].masked_fill_(weight_RV[rows] < threshold, 0.0)


def _keep_top_p(weight_RV: Tensor, top_p_R: Tensor) -> None:
    """Keep the smallest set of largest weights whose share reaches top_p; at least one stays."""
    rows = (top_p_R < 1.0).nonzero().squeeze(1)
    if rows.numel() == 0:
        return
    ordered, ids = weight_RV[rows].sort(dim=-1, descending=True, stable=True)
    cumulative = ordered.cumsum(-1, dtype=torch.float64)
    before = cumulative - ordered
    drop = before >= top_p_R[rows].double().unsqueeze(1) * cumulative[:, -1:]
    drop[:, 0] = False
    ordered.masked_fill_(drop, 0.0)
    weight_RV[rows] = torch.zeros_like(ordered).scatter_(1, ids, ordered)
