"""Which experts get the spare slots: copies that let load flow between actors in every step.

Copies placed by heat alone make a window look even, but a step differs from its window, and only
where two actors hold the same expert can one take over from the other. So spare slots connect:
each actor also holds the hottest expert of another one, in rings. Experts too hot for two actors
get more copies first.

P actors, E experts of one layer.
"""

import numpy as np
from numpy.typing import NDArray

HEAVY = 0.75  # of an actor's mean load: an expert with more than this per copy gets another copy
ALIKE = 1.05  # max/mean load of actors up to which they count as equal


def place_spares(
    holds_PE: NDArray[np.bool_], load_E: NDArray[np.number], free_P: NDArray[np.integer]
) -> list[tuple[int, int]]:
    """(actor, expert) of each new copy, in the order of their use; what is held stays.

    holds_PE: actor p has a copy of expert e. load_E: popularity, in any unit. free_P: slots that
    each actor has left; some stay free only where the actor holds every expert that has a holder.
    Pure and deterministic.
    """
    holds_PE, left_P = holds_PE.copy(), np.array(free_P, np.int64)
    weight_E = np.asarray(load_E, np.float64)
    spares: list[tuple[int, int]] = []
    _share_heavy(holds_PE, weight_E, left_P, spares)
    ring = _ring(holds_PE @ (weight_E / np.maximum(holds_PE.sum(0), 1)))
    steps, taken = _steps(len(ring), int(left_P.max(initial=0))), -1
    while left_P.any() and taken < len(spares):
        taken = len(spares)
        for step in steps:
            _connect(holds_PE, weight_E, left_P, ring, step, spares)
        steps = list(range(1, len(ring)))  # where the first steps found nothing
    return spares


def _share_heavy(
    holds_PE: NDArray[np.bool_],
    load_E: NDArray[np.float64],
    free_P: NDArray[np.int64],
    spares: list[tuple[int, int]],
) -> None:
    """While the most loaded copy is heavy, its expert gets one more, on the lightest actor."""
    count_E = holds_PE.sum(0)
    share_E = np.divide(load_E, count_E, out=np.full(len(load_E), -1.0), where=count_E > 0)
    load_P = holds_PE @ np.maximum(share_E, 0.0)
    heavy = HEAVY * load_E.sum() / len(holds_PE)
    while free_P.any():
        expert = int(share_E.argmax())
        if share_E[expert] <= heavy:
            return
        can_P = (free_P > 0) & ~holds_PE[:, expert]
        if not can_P.any():
            share_E[expert] = -1.0
            continue
        actor = int(np.where(can_P, load_P, np.inf).argmin())
        load_P[holds_PE[:, expert]] -= share_E[expert]
        holds_PE[actor, expert] = True
        free_P[actor] -= 1
        count_E[expert] += 1
        share_E[expert] = load_E[expert] / count_E[expert]
        load_P[holds_PE[:, expert]] += share_E[expert]
        spares.append((actor, expert))


def _ring(load_P: NDArray[np.float64]) -> NDArray[np.int64]:
    """Actors by number if their loads are alike, else heavy and light ones in turn.

    What a heavy actor has too much its light neighbour can take. Between equals the sort would
    follow noise, and that was measured to be a little worse than no sort.
    """
    if load_P.max(initial=0.0) <= ALIKE * load_P.mean():
        return np.arange(len(load_P))
    order = np.argsort(-load_P, kind="stable")
    ring = np.empty_like(order)
    heavier = -(-len(order) // 2)
    ring[0::2], ring[1::2] = order[:heavier], order[heavier:][::-1]
    return ring


def _steps(actors: int, spares: int) -> list[int]:
    """How far round the ring the nth spare slot looks: 1, then ever wider, P^(n / spares).

    Wide steps make ways between any two actors short; 1 and 2 alone would still be one long ring.
    """
    steps = [round(actors ** (nth / spares)) for nth in range(spares)]
    return [step for step in dict.fromkeys(steps) if step < actors]


def _connect(
    holds_PE: NDArray[np.bool_],
    load_E: NDArray[np.float64],
    free_P: NDArray[np.int64],
    ring: NDArray[np.int64],
    step: int,
    spares: list[tuple[int, int]],
) -> None:
    """Every actor with a free slot takes the hottest expert, by load per copy, `step` ahead."""
    if not free_P.any():
        return
    count_E = np.maximum(holds_PE.sum(0), 1)
    absent_PE = ~holds_PE[ring] & holds_PE[np.roll(ring, -step)]
    can_P = (free_P[ring] > 0) & absent_PE.any(1)
    hottest_P = np.where(absent_PE, load_E / count_E, -1.0).argmax(1)
    actors, experts = ring[can_P], hottest_P[can_P]
    holds_PE[actors, experts] = True
    free_P[actors] -= 1
    spares += zip(actors.tolist(), experts.tolist(), strict=True)
