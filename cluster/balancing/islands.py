"""What the next window may add to the load of actors that can hand on little.

The load of an actor is known from so many hits that the next window differs by about two percent,
by eight percent in the worst of thousands of actors. Actors that hold the same experts average
that out, as far as load can flow between them; a few that share experts only with each other, an
island, average over few, and nobody else can take it.
"""

import numpy as np

from expertmesh.cluster.balancing.table import Floats, Ints

NOISE, BORNE = 0.075, 0.02
"""In mean loads of an actor: how far one may rise, n together by the root of n less, and what of
that the limit of a layer leaves room for."""
THIN = 0.05
"""Load of an expert, in mean loads of an actor, below which its copies connect nobody."""
ROUNDS, LARGEST = 3, 12
"""Islands of up to so many actors, as far as so many steps from copy to copy reach, are found."""


def _risk(actors: int) -> float:
    return float(max(0.0, NOISE / actors**0.5 - BORNE))


ALONE = _risk(1)
RISK_OF_SIZE = np.array([0.0, *map(_risk, range(1, LARGEST)), 0.0])


def island_risks(group_C: Ints, actor_C: Ints, load_G: Floats, shared_A: Floats) -> Floats:
    """[A]: the surcharge of each actor: as a part of its island, or as one that shares little.

    group_C, actor_C: expert and actor of each copy that is not alone. load_G: of these experts.
    shared_A: what the actor serves of them.
    """
    island_A = np.arange(len(shared_A))
    thick_C = (load_G >= THIN).take(group_C)
    group_C, actor_C = group_C[thick_C], actor_C[thick_C]
    for _ in range(ROUNDS):
        least_G = np.full(len(load_G), len(shared_A))
        np.minimum.at(least_G, group_C, island_A.take(actor_C))
        np.minimum.at(island_A, actor_C, least_G.take(group_C))
    size_A = np.bincount(island_A, minlength=len(island_A))
    here_C, there_C = island_A.take(actor_C), least_G.take(group_C)
    goes_on_C = here_C != there_C
    size_A[here_C[goes_on_C]] = LARGEST
    size_A[there_C[goes_on_C]] = LARGEST
    risk_A: Floats = RISK_OF_SIZE.take(np.minimum(size_A, LARGEST)).take(island_A)
    return np.maximum(risk_A, ALONE - shared_A)
