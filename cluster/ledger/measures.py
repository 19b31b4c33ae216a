"""How uneven a load is. Pure functions; L layers, E experts, A expert actors.

Without load there is no unevenness: a layer without hits gives None where a number would be a
division by zero.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from expertmesh.cluster.placement import Placement

Floats = np.ndarray


def gini(load_E: Floats) -> float | None:
    """0: all equal; near 1: one has all."""
    total, size = float(load_E.sum()), len(load_E)
    if total <= 0:
        return None
    ascending_E = np.sort(load_E)
    ranks_E = np.arange(1, size + 1)
    return float(2 * (ranks_E * ascending_E).sum() / (size * total) - (size + 1) / size)


def entropy(load_LE: Floats) -> Floats:
    """[L], of each layer's shares over log(E): 1 for equal shares, 0 for one expert; NaN without
    load. With a single expert it is 1."""
    size = load_LE.shape[1]
    if size == 1:
        return np.ones(len(load_LE))
    with np.errstate(invalid="ignore", divide="ignore"):
        share_LE = load_LE / load_LE.sum(1, keepdims=True)
        terms_LE = share_LE * np.log(np.where(share_LE > 0, share_LE, 1.0))
    entropy_L: Floats = -terms_LE.sum(1) / np.log(size)
    return entropy_L


def imbalance(load_A: Floats) -> float | None:
    """Largest over mean load of the ranks: 1 is even, A is all on one. How long the slowest rank
    keeps the others waiting, as a factor."""
    total = float(load_A.sum())
    return None if total <= 0 else float(load_A.max()) * len(load_A) / total


def rank_loads(load_E: Floats, held: Sequence[Sequence[int]]) -> Floats:
    """float64 [A]: what each actor carries when the copies of an expert share its load evenly.

    held: per actor, its experts of this layer.
    """
    experts_S = np.array(list(chain.from_iterable(held)), dtype=np.int64)
    actors_S = np.repeat(np.arange(len(held)), [len(experts) for experts in held])
    copies_E = np.bincount(experts_S, minlength=len(load_E))
    shares_S = load_E[experts_S] / copies_E[experts_S]
    return np.bincount(actors_S, weights=shares_S, minlength=len(held))


def layer_rank_loads(load_LE: Floats, layers: Sequence[int], placement: Placement | None) -> Floats:
    """float64 [L, A]; [L, 0] without an expert tier."""
    if placement is None or not placement.held:
        return np.zeros((len(layers), 0))
    held = placement.held
    return np.stack([rank_loads(load_LE[i], held[layer]) for i, layer in enumerate(layers)])
