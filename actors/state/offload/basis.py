"""Which directions of a cached row its sketch keeps (kv-state 3.3 d)."""

import torch
from torch import Tensor

from expertmesh.kernels.sketch.types import Basis

KEPT, WIDE = 56, 8
# A row serves as key and as value: an error counts by what it does to the scores, and so much by
# what it does to the values. Measured on the bundled model: 0.1 to 1 hardly differ, 0 is worse.
VALUE_SHARE = 0.3
# Directions with less than this share of the largest variance are noise, which whitening would
# blow up.
LEAST_VARIANCE = 1e-6


def fit_basis(
    rows_TC: Tensor, moment_CC: Tensor | None, rank: int, scale: float, kept: int = KEPT
) -> Basis:
    """The basis that serves these rows best.

    moment_CC: mean of q q' over absorbed queries; None when it is not known, and then the rows'
    own principal directions are kept. rank: leading columns that are values, R. scale: of scores.

    With S the rows' covariance and M = scale^2 E[q q'] + values' share, the eigenvectors V of
    S^1/2 M S^1/2 are the directions in which errors cost most; y = V' S^-1/2 (z - mean).
    """
    rows = rows_TC.double()
    width = rows.shape[1]
    mean = rows.mean(dim=0)
    centred = rows - mean
    covariance = centred.T @ centred / rows.shape[0]
    value = rows[:, :rank].square().sum(dim=1).mean().clamp(min=torch.finfo(torch.float32).tiny)
    metric = torch.zeros_like(covariance)
    metric.diagonal()[:rank] = VALUE_SHARE / value
    if moment_CC is None:
        metric = torch.eye(width, dtype=torch.float64, device=rows.device)
    else:
        metric += scale**2 * moment_CC.double()
    variances, axes = torch.linalg.eigh(covariance)
    least = variances[-1] * LEAST_VARIANCE + torch.finfo(torch.float32).tiny
    roots = variances.clamp(min=least).sqrt()
    half, inverse = (axes * roots) @ axes.T, (axes / roots) @ axes.T
    _, found = torch.linalg.eigh(half @ metric @ half)
    kept = min(kept, width) // 2 * 2
    best = found.flip(1)[:, :kept]
    return Basis(
        mean.float(), (inverse @ best).float(), (half @ best).float(), min(WIDE, kept // 2 * 2)
    )
