"""Windows of expert loads for many layers: popularity, its drift, and the counts of a window.

L layers, E experts. A token picks an expert at most once, so a window of T tokens counts each
expert Binomial(T, chance to be among the K picked), drawn independently: as sampling K of E without
replacement per token, but for the fixed sum.
"""

import numpy as np
from numpy.typing import NDArray

from tests.support.routing_loads import expected_counts

Floats = NDArray[np.float64]

TOKENS, TOP_K = 16_384, 16


def popularity(rng: np.random.Generator, kind: str, layers: int, experts: int) -> Floats:
    """[L, E] logarithms. kind: "lognormal SIGMA" or "zipf POWER", ranks in a random order."""
    name, parameter = kind.split()
    if name == "lognormal":
        return rng.normal(0.0, float(parameter), (layers, experts))
    ranks = np.arange(1, experts + 1)
    return rng.permuted(np.tile(-float(parameter) * np.log(ranks), (layers, 1)), axis=1)


def drifted(rng: np.random.Generator, kind: str, old_LE: Floats, part: float) -> Floats:
    """Renews part of the variance (lognormal) or re-ranks part of the experts (zipf); 1 = all."""
    if part == 0.0:
        return old_LE
    new_LE = popularity(rng, kind, *old_LE.shape)
    if part == 1.0:
        return new_LE
    if kind.startswith("lognormal"):
        return np.sqrt(1 - part) * old_LE + np.sqrt(part) * new_LE
    mixed_LE = old_LE.copy()
    for row_E in mixed_LE:
        some = rng.choice(len(row_E), int(len(row_E) * part), replace=False)
        row_E[some] = row_E[rng.permutation(some)]
    return mixed_LE


def window(rng: np.random.Generator, popularity_LE: Floats, tokens: int = TOKENS) -> Floats:
    """[L, E] counts."""
    chance_LE = np.stack([expected_counts(np.exp(row_E), 1, TOP_K) for row_E in popularity_LE])
    return rng.binomial(tokens, chance_LE).astype(np.float64)


def gini(load_LE: Floats) -> float:
    """Mean over layers."""
    sorted_LE = np.sort(load_LE, axis=1)
    experts = load_LE.shape[1]
    weight_E = 2 * np.arange(1, experts + 1) - experts - 1
    return float(((sorted_LE @ weight_E) / (experts * sorted_LE.sum(1))).mean())
