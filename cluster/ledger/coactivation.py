"""Which experts are chosen together. N tokens, K experts per token, E experts."""

import msgspec
import numpy as np


class Pair(msgspec.Struct, frozen=True):
    """tokens: that chose both. lift: times as many as independent choices would give."""

    first: int
    second: int
    tokens: int
    lift: float


def coactivation(ids_NK: np.ndarray, experts: int) -> np.ndarray:
    """int64 [E, E], symmetric: tokens that chose both; on the diagonal, tokens that chose one."""
    ids_NK = np.sort(ids_NK.astype(np.int64), axis=1)
    first, second = np.triu_indices(ids_NK.shape[1])
    codes = (ids_NK[:, first] * experts + ids_NK[:, second]).ravel()
    upper_EE = np.bincount(codes, minlength=experts * experts).reshape(experts, experts)
    return upper_EE + np.triu(upper_EE, 1).T


def top_pairs(together_EE: np.ndarray, tokens: int, most: int = 10) -> list[Pair]:
    """The pairs with the most tokens beyond chance, best first; none below chance."""
    if not tokens:
        return []
    alone_E = together_EE.diagonal().astype(np.float64)
    chance_EE = np.outer(alone_E, alone_E) / tokens
    excess_EE = np.triu(together_EE - chance_EE, 1)
    best = np.argsort(-excess_EE, axis=None, kind="stable")[:most]
    lift_EE = together_EE / np.maximum(chance_EE, 1e-9)
    rows, columns = np.unravel_index(best, excess_EE.shape)
    return [
        Pair(int(a), int(b), int(together_EE[a, b]), round(float(lift_EE[a, b]), 3))
        for a, b in zip(rows, columns, strict=True)
        if excess_EE[a, b] > 0
    ]
