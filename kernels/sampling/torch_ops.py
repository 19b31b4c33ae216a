"""Sampling from logits, fast on CPU. Rows never influence each other."""

import math

import numpy as np
import torch
from torch import Tensor

from expertmesh.kernels.sampling.philox import counter_uniform

GREEDY_BELOW = 1e-5  # temperatures below it are argmax: any float32 gap becomes certainty
NUCLEUS_TRY = 512  # largest weights that are sorted before all of them are
BLOCK = 64  # ids per block of the two-level cumulative sum
BELOW_ONE = 1.0 - 2.0**-52  # times a positive float64: strictly smaller

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
    logits, and so does a row without a finite maximum (all -inf, or any +inf or NaN). On another
    device the logits are copied to the host.
    """
    device = logits_BV.device
    if device.type != "cpu":
        asked = (logits_BV, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
        return sample(*(x.cpu() for x in asked)).to(device)
    drawn = [row for row, t in enumerate(temperature_B.tolist()) if t >= GREEDY_BELOW]
    if not drawn:
        return _argmax(logits_BV)
    peak_B1 = logits_BV.amax(-1, keepdim=True)
    peaks = peak_B1.squeeze(1).tolist()
    drawn = [row for row in drawn if math.isfinite(peaks[row])]
    if len(drawn) == len(logits_BV):
        return _draw(logits_BV, peak_B1, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
    ids_B = _argmax(logits_BV)
    if drawn:
        rows = torch.tensor(drawn)
        settings = (logits_BV, peak_B1, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
        ids_B[rows] = _draw(*(x.index_select(0, rows) for x in settings))
    return ids_B


def _argmax(logits_BV: Tensor) -> Tensor:
    """Lowest id of the largest logit (or of a NaN); numpy's is ten times as fast as torch's."""
    return torch.from_numpy(logits_BV.float().numpy().argmax(-1))


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
    filters = zip(top_k_R.tolist(), top_p_R.tolist(), min_p_R.tolist(), strict=True)
    edges = [_edge(row, *f) for row, f in zip(weight_RV.numpy(), filters, strict=True)]
    if any(edges):
        weight_RV.masked_fill_(weight_RV < torch.tensor(edges).unsqueeze(1), 0.0)
    return _inverse_cdf(weight_RV, uniform_R)


def _edge(weight_V: np.ndarray, top_k: int, top_p: float, min_p: float) -> float:
    """Smallest weight that the filters keep (0: all). Partial sorts of values, no ids involved."""
    edge = 0.0
    if 0 < top_k < weight_V.size:
        edge = float(np.partition(weight_V, weight_V.size - top_k)[weight_V.size - top_k])
        weight_V = weight_V[weight_V >= edge]
    if top_p < 1.0:
        goal = top_p * float(weight_V.sum(dtype=np.float64))
        for size in (min(NUCLEUS_TRY, weight_V.size), weight_V.size):
            ordered = np.partition(weight_V, weight_V.size - size)[weight_V.size - size :]
            ordered = np.sort(ordered)[::-1]
            reached = ordered.cumsum(dtype=np.float64)
            if reached[-1] >= goal:
                break
        edge = float(ordered[min(int(reached.searchsorted(goal)), size - 1)])
    return max(edge, min_p)


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
    total_R1 = reached_RN[:, -1:]
    # Strictly below the total, or the search could run past the last positive weight: the product
    # may round up, and a uniform number rounded to float32 may be 1.
    highest_R1 = total_R1 * BELOW_ONE
    target_R1 = torch.minimum(uniform_R.double().unsqueeze(1) * total_R1, highest_R1)
    block_R1 = torch.searchsorted(reached_RN, target_R1, right=True)
    before_R1 = torch.cat((torch.zeros_like(total_R1), reached_RN), dim=1).gather(1, block_R1)
    first_R = torch.arange(rows).mul_(blocks_RNB.shape[1]).add_(block_R1.squeeze(1))
    inside_RB = blocks_RNB.flatten(0, 1).index_select(0, first_R).cumsum(-1, dtype=torch.float64)
    rest_R1 = torch.minimum(target_R1 - before_R1, inside_RB[:, -1:] * BELOW_ONE)
    offset_R1 = torch.searchsorted(inside_RB, rest_R1, right=True)
    return block_R1.mul_(BLOCK).add_(offset_R1).squeeze(1)
