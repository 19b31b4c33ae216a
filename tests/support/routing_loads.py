"""Synthetic routing: popularity of experts, the experts that tokens choose, simple placements.

T tokens, E experts, K experts per token, P actors.
"""

import numpy as np
from numpy.typing import NDArray


def lognormal(rng: np.random.Generator, experts: int, sigma: float) -> NDArray[np.float64]:
    return rng.lognormal(sigma=sigma, size=experts)


def zipf(rng: np.random.Generator, experts: int, power: float) -> NDArray[np.float64]:
    return rng.permutation(1.0 / np.arange(1, experts + 1) ** power)


def choose(
    rng: np.random.Generator, popularity_E: NDArray[np.float64], tokens: int, top_k: int
) -> NDArray[np.int64]:
    """int64 [T, K]: K different experts per token, drawn one after the other by popularity."""
    chosen = []
    for begin in range(0, tokens, 4096):
        rows = min(4096, tokens - begin)
        race_TE = rng.standard_exponential((rows, len(popularity_E))) / popularity_E
        chosen.append(np.argpartition(race_TE, top_k - 1, axis=1)[:, :top_k])
    return np.concatenate(chosen)


def expected_counts(
    popularity_E: NDArray[np.float64], tokens: int, top_k: int
) -> NDArray[np.float64]:
    """Choices per expert that `choose` gives on average: those that arrive before the Kth did."""
    low, high = 0.0, top_k / popularity_E.min()
    for _ in range(100):
        time = (low + high) / 2
        if (1.0 - np.exp(-popularity_E * time)).sum() < top_k:
            low = time
        else:
            high = time
    return tokens * (1.0 - np.exp(-popularity_E * high))


def one_copy_each(load_E: NDArray[np.number], actors: int) -> NDArray[np.bool_]:
    """bool [P, E]: heaviest first to the lightest actor that has a slot free."""
    slots = -(-len(load_E) // actors)
    load_P, held_P = np.zeros(actors), np.zeros(actors, int)
    holds_PE = np.zeros((actors, len(load_E)), bool)
    for expert in np.argsort(-load_E, kind="stable"):
        actor = int(np.where(held_P < slots, load_P, np.inf).argmin())
        holds_PE[actor, expert] = True
        load_P[actor] += load_E[expert]
        held_P[actor] += 1
    return holds_PE


def fan_out(actors_TK: NDArray[np.integer]) -> float:
    """Distinct actors per token, mean."""
    sorted_TK = np.sort(actors_TK, axis=1)
    return float(1.0 + (sorted_TK[:, 1:] != sorted_TK[:, :-1]).sum(1).mean())
