"""From routing to a graph over the experts of one layer: how much two of them belong together.

E experts, N tokens, K choices per token, H the router's input width.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.groups.types import Floats, Ints
from expertmesh.cluster.ledger.coactivation import coactivation

# Pairs are counted for so many tokens at a time; each takes K * (K + 1) / 2 numbers of memory.
CHUNK = 8192


def together(ids_NK: NDArray[np.integer], experts: int) -> Ints:
    """int64 [E, E], symmetric, zero diagonal: tokens that chose both experts of a pair."""
    pairs_EE = np.zeros((experts, experts), np.int64)
    for begin in range(0, len(ids_NK), CHUNK):
        pairs_EE += coactivation(ids_NK[begin : begin + CHUNK], experts)
    np.fill_diagonal(pairs_EE, 0)
    return pairs_EE


def beyond_chance(pairs_EE: Ints) -> Floats:
    """float64 [E, E] >= 0: co-activation minus what independent choices of the same experts give.

    Raw counts would say that popular experts belong together; put on one actor they overload it
    and save little, as every token goes there anyway. (The null model of Newman's modularity.)
    """
    total = pairs_EE.sum()
    if total == 0:
        return np.zeros(pairs_EE.shape)
    degree_E = pairs_EE.sum(axis=1).astype(np.float64)
    excess: Floats = np.maximum(pairs_EE - np.outer(degree_E, degree_E) / total, 0.0)
    np.fill_diagonal(excess, 0.0)
    return excess


def router_similarity(weight_EH: NDArray[np.floating]) -> Floats:
    """float64 [E, E] >= 0: cosine of the router's rows beyond the layer's mean cosine.

    A prior for when there is no traffic: rows that point the same way fire on the same tokens.
    """
    rows = np.asarray(weight_EH, np.float64)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    cosine = rows @ rows.T
    off_diagonal = ~np.eye(len(rows), dtype=bool)
    mean = cosine[off_diagonal].mean() if len(rows) > 1 else 0.0
    similar: Floats = np.maximum(cosine - mean, 0.0)
    np.fill_diagonal(similar, 0.0)
    return similar
