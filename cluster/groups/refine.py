"""Makes a partition even in load by swaps that keep its sizes and cost least co-activation.

METIS balances one weight per vertex; here sizes must be exact and loads near even. So it gets the
sizes, and swaps do the loads: a swap leaves sizes alone.
"""

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.groups.types import Floats, Ints

Floats32 = NDArray[np.float32]

# Overload is first cheap, then dear: early swaps still look for good pairs, the last ones pay any
# price for an even load. In units of the graph weight inside all parts per load of one part.
PRICES = (0.2, 0.6, 2.0, 10.0, 1e4)
# Looked through, best first, for swaps of parts that no better swap has touched.
CANDIDATES = 4096
# Rounds per price. Each round that swaps lowers the cost; the bound is for the clock's sake.
ROUNDS = 60
# Below this (times 1 + price) a float32 value is noise, and swaps could undo each other for ever.
NOISE = 1e-5


def even_loads(
    part_E: Ints, graph_EE: Floats, load_E: Floats, parts: int, max_imbalance: float
) -> Ints:
    """int64 [E]: swaps until no part's load exceeds max_imbalance x mean, where that can be had.

    Among the ways there it prefers those that keep, or gain, weight inside the parts. A load that
    no swap can even out (one expert hotter than a part may be) is lowered as far as swaps do.
    """
    part_E = part_E.copy()
    if not load_E.any():
        return part_E
    share_E = load_E / load_E.sum() * parts  # a part's mean is 1
    graph = (graph_EE / (graph_EE.sum() or 1.0) * parts).astype(np.float32)
    for price in PRICES:
        for _ in range(ROUNDS):
            swaps = _round(part_E, graph, share_E, parts, max_imbalance, price)
            if not swaps:
                break
            for one, other in swaps:
                part_E[one], part_E[other] = part_E[other], part_E[one]
    return part_E


def _round(
    part_E: Ints, graph_EE: Floats32, share_E: Floats, parts: int, cap: float, price: float
) -> list[tuple[int, int]]:
    """Swaps of one round. They touch different parts, so their values add up exactly."""
    value_EE = _values(part_E, graph_EE, share_E, parts, cap, price)
    one, other = np.nonzero(value_EE > NOISE * (1.0 + price))
    once = (one < other) & (part_E[one] != part_E[other])
    one, other = one[once], other[once]
    best = np.argsort(-value_EE[one, other], kind="stable")[:CANDIDATES]
    touched, swaps = np.zeros(parts, bool), []
    for a, b in zip(one[best].tolist(), other[best].tolist(), strict=True):
        if not (touched[part_E[a]] or touched[part_E[b]]):
            touched[part_E[a]] = touched[part_E[b]] = True
            swaps.append((a, b))
    return swaps


def _values(
    part_E: Ints, graph_EE: Floats32, share_E: Floats, parts: int, cap: float, price: float
) -> Floats32:
    """float32 [E, E]: what exchanging the places of two experts is worth.

    That is the graph weight that comes inside the parts, less `price` times the load above the cap
    that it adds. Written as one expert's half plus its transpose, as E x E passes are the cost.
    """
    share_P = np.bincount(part_E, weights=share_E, minlength=parts)
    to_part_EP = graph_EE @ np.eye(parts, dtype=np.float32)[part_E]
    relief_E = price * np.maximum(share_P[part_E] - cap, 0.0)
    stay_E = to_part_EP[np.arange(len(part_E)), part_E]
    half_EE = (to_part_EP + (relief_E - stay_E)[:, None].astype(np.float32))[:, part_E]
    without_E = (share_P[part_E] - cap - share_E).astype(np.float32)
    over_EE = without_E[:, None] + share_E[None, :].astype(np.float32)
    np.maximum(over_EE, 0.0, out=over_EE)
    over_EE *= np.float32(price)
    half_EE -= over_EE
    value: Floats32 = half_EE + half_EE.T
    value -= 2.0 * graph_EE
    return value
