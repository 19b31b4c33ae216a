"""One query over a long context: exact where rows are at hand, by estimate elsewhere.

Letters as in kernels/sketch/types.py; K exact rows, R leading columns that are values.
All sums are in float32.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Estimates(Protocol):
    """What stands for the rows of old tokens, T of them."""

    def weighted_sum(self, weights_HT: Tensor) -> Tensor:
        """sum_t weight_t * (estimate of row t), float32 [H, C]."""
        ...


class Attended(NamedTuple):
    """out_HR: the attended latent, float32. weights_HT: of the tokens that were estimated, out of 1
    for all."""

    out_HR: Tensor
    weights_HT: Tensor


def attend(
    rows_KC: Tensor, scores_HK: Tensor, estimated_HT: Tensor, estimates: Estimates, rank: int
) -> Attended:
    """Softmax over the scores of exact rows and of estimates (minus infinity where a token is among
    the exact ones), and the weighted sum of both kinds of rows."""
    peak_H1 = torch.maximum(
        scores_HK.amax(dim=1, keepdim=True), estimated_HT.amax(dim=1, keepdim=True)
    )
    exact_HK, guessed_HT = (scores_HK - peak_H1).exp(), (estimated_HT - peak_H1).exp()
    total_H1 = exact_HK.sum(dim=1, keepdim=True) + guessed_HT.sum(dim=1, keepdim=True)
    sum_HR = exact_HK @ rows_KC[:, :rank] + estimates.weighted_sum(guessed_HT)[:, :rank]
    return Attended(sum_HR / total_H1, guessed_HT / total_H1)
