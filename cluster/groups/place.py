"""A first placement from groups: each group whole on one actor, as far as sizes allow."""

import numpy as np

from expertmesh.cluster.groups.refine import even_loads
from expertmesh.cluster.groups.types import Floats, Groups, Ints, group_sizes
from expertmesh.cluster.placement import Placement, PlacementError, check_actors

# As for groups: below what is allowed in service.
MAX_IMBALANCE = 1.02


def place_groups(groups: Groups, loads_LE: Floats | None, actors: int, slots: int) -> Placement:
    """One copy of each expert; slots beyond that stay free for copies.

    loads_LE: hits per layer (ascending) and expert, None before traffic. With as many groups as
    actors an actor's experts are a group, unchanged. With other numbers groups are packed, heavy
    ones first, those that do not fit are cut, and swaps even out the loads.
    Raises PlacementError.
    """
    held: dict[int, tuple[tuple[int, ...], ...]] = {}
    for index, layer in enumerate(sorted(groups.of)):
        group_E = groups.of[layer]
        check_actors(len(group_E), actors)
        load_E = np.ones(len(group_E)) if loads_LE is None else loads_LE[index].astype(np.float64)
        actor_E = group_E
        if groups.count != actors:
            together_EE = (group_E[:, None] == group_E[None, :]).astype(np.float64)
            np.fill_diagonal(together_EE, 0.0)
            packed_E = _pack(group_E, load_E, groups.count, actors)
            actor_E = even_loads(packed_E, together_EE, load_E, actors, MAX_IMBALANCE)
        held[layer] = _held(actor_E, layer, actors, slots)
    return Placement(held)


def _held(actor_E: Ints, layer: int, actors: int, slots: int) -> tuple[tuple[int, ...], ...]:
    sizes = np.bincount(actor_E, minlength=actors)
    if sizes.max() > slots:
        raise PlacementError(
            f"actor {sizes.argmax()} would hold {sizes.max()} experts of layer {layer} and has "
            f"{slots} slots: {len(actor_E)} experts on {actors} actors need at least "
            f"{-(-len(actor_E) // actors)} slots each"
        )
    return tuple(tuple(int(e) for e in np.flatnonzero(actor_E == a)) for a in range(actors))


def _pack(group_E: Ints, load_E: Floats, count: int, actors: int) -> Ints:
    """int64 [E]: heavy groups first, each to the lightest actor with room for it, else cut up."""
    room = group_sizes(len(group_E), actors)
    load_A = np.zeros(actors)
    actor_E = np.full(len(group_E), -1)
    heavy_first = np.argsort(-np.bincount(group_E, weights=load_E, minlength=count), kind="stable")
    for group in heavy_first:
        members = np.flatnonzero(group_E == group)
        while len(members):
            fits = room >= len(members)
            # No actor takes them all: the one with most room takes what it can.
            open_A = np.flatnonzero(fits if fits.any() else room == room.max())
            actor = open_A[load_A[open_A].argmin()]
            taken, members = np.split(members, [room[actor]])
            actor_E[taken] = actor
            room[actor] -= len(taken)
            load_A[actor] += load_E[taken].sum()
    return actor_E
