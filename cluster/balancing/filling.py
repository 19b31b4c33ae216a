"""Which experts free slots get: copies that connect actors, so that load can flow between them."""

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.table import FREE, Floats, Ints


def fill(ids_LPS: Ints, load_LE: Floats, chosen_L: NDArray[np.bool_]) -> None:
    """Puts a copy in every free slot of the chosen layers that can hold one; changes the table in place.

    The actors of a layer stand in a ring where heavy and light ones alternate. The first free slot
    of an actor gets the hottest expert of its successor, the next one of the second next, and so
    on, by load per copy, always one that it does not hold.
    """
    for layer in np.flatnonzero(chosen_L):
        _fill_layer(ids_LPS[layer], load_LE[layer])


def _fill_layer(ids_PS: Ints, load_E: Floats) -> None:
    actors, experts = len(ids_PS), len(load_E)
    holds_PE = np.zeros((actors, experts), bool)
    actor_C, slot_C = np.nonzero(ids_PS != FREE)
    holds_PE[actor_C, ids_PS[actor_C, slot_C]] = True
    count_E = holds_PE.sum(0)
    ring = _ring(holds_PE @ (load_E / count_E))
    steps = dict.fromkeys(ring, 0)
    free = {actor: list(np.flatnonzero(ids_PS[actor] == FREE)) for actor in ring}
    place = {actor: index for index, actor in enumerate(ring)}
    while waiting := [actor for actor in ring if free[actor]]:
        for actor in waiting:
            absent_E = ~holds_PE[actor]
            if not absent_E.any():
                free[actor].clear()
                continue
            for _ in range(actors):
                steps[actor] = steps[actor] % (actors - 1) + 1 if actors > 1 else 0
                other = ring[(place[actor] + steps[actor]) % actors]
                eligible_E = absent_E & holds_PE[other]
                if eligible_E.any():
                    break
            expert = int(np.where(eligible_E, load_E / count_E, -1.0).argmax())
            ids_PS[actor, free[actor].pop(0)] = expert
            holds_PE[actor, expert] = True
            count_E[expert] += 1


def _ring(load_P: Floats) -> list[int]:
    """Heaviest, lightest, second heaviest, second lightest, ..."""
    order = np.argsort(-load_P, kind="stable").tolist()
    ring: list[int] = []
    while order:
        ring.append(order.pop(0))
        if order:
            ring.append(order.pop())
    return ring
