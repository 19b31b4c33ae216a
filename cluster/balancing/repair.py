"""Small changes to a table that even out the loads, many layers and actors at once.

A step pairs actors that have too much with actors that have too little and changes one slot per
light actor. `copy_to_light` gives it another copy of an expert of the heavy one, in a free slot or
in place of a copy that others can do without: one expert moves, and the two actors can share its
load from then on. `swap` exchanges two experts, where no copy can go: two experts move.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.shares import Shares
from expertmesh.cluster.balancing.table import FREE, Floats, Ints

Bools = NDArray[np.bool_]

LOOKED_AT = 16
"""Experts of an actor, by load, that a step considers."""
STRANDING = 0.5
"""Price, in mean loads of an actor, of dropping the copy that another actor's only exchange is."""


class Pairs(NamedTuple):
    """N pairs of a heavy and a light actor of one layer; a light one is in one pair only.

    nth_N: of the heavy one's pairs. amount_N: load that should pass, in mean loads of an actor.
    """

    layer_N: Ints
    heavy_N: Ints
    light_N: Ints
    nth_N: Ints
    amount_N: Floats


def pairs_by_load(load_LP: Floats, goal: float) -> Pairs:
    """Pours the excess of the heaviest into the room of the lightest, in order (the north-west
    corner of the transport problem); an actor counts as heavy above `goal`."""
    layers, actors = load_LP.shape
    row_L1 = np.arange(layers)[:, None]
    lightest_LP = np.argsort(load_LP, axis=1, kind="stable")
    sorted_LP = load_LP[row_L1, lightest_LP]
    room_LP = np.maximum(1.0 - sorted_LP, 0.0)
    heaviest_first_LP = sorted_LP[:, ::-1]
    excess_LP = np.where(heaviest_first_LP > goal, heaviest_first_LP - 1.0, 0.0)
    # One searchsorted over all layers: each layer's sums lie in a range of their own.
    offset_L1 = row_L1 * 4.0 * actors
    poured_LP = np.cumsum(excess_LP, axis=1) + offset_L1
    middle_LP = np.cumsum(room_LP, axis=1) - room_LP / 2 + offset_L1
    nth_heavy_LP = (
        np.searchsorted(poured_LP.reshape(-1), middle_LP.reshape(-1), side="right").reshape(
            load_LP.shape
        )
        - row_L1 * actors
    )
    served_LP = (room_LP > 0.0) & (nth_heavy_LP < actors)
    layer_N, nth_light_N = np.nonzero(served_LP)
    nth_heavy_N = nth_heavy_LP[layer_N, nth_light_N]
    excess_N = excess_LP[layer_N, nth_heavy_N]
    keep_N = excess_N > 0.0
    layer_N, nth_light_N, nth_heavy_N = layer_N[keep_N], nth_light_N[keep_N], nth_heavy_N[keep_N]
    return Pairs(
        layer_N,
        lightest_LP[layer_N, actors - 1 - nth_heavy_N],
        lightest_LP[layer_N, nth_light_N],
        _nth_in_run(layer_N * actors + nth_heavy_N),
        np.minimum(room_LP[layer_N, nth_light_N], excess_N[keep_N]),
    )


def copy_to_light(shares: Shares, pairs: Pairs) -> int:
    """Changes the table and the shares (not the loads) in place; returns how many slots."""
    layer_N, heavy_N, light_N, nth_N, amount_N = pairs
    if not len(layer_N):
        return 0
    ids, share = shares.ids_LPS, shares.share_LPS
    experts = shares.load_LE.shape[1]
    index_N = np.arange(len(layer_N))
    given_N, share_N = _expert_to_give(shares, pairs)
    slot_N, gone_share_N, price_N = _slot_to_use(shares, layer_N, light_N)
    gone_N = ids[layer_N, light_N, slot_N]
    passed_N = np.minimum(share_N, amount_N + gone_share_N)
    worth_N = (share_N > 0.0) & (passed_N > 1.5 * gone_share_N) & np.isfinite(price_N)
    # Two actors must not both drop an expert because the other still has it: first come.
    key_N = np.where(gone_N == FREE, shares.load_LE.size + index_N, layer_N * experts + gone_N)
    n = _first_of_each(key_N, np.flatnonzero(worth_N))
    layer_N, heavy_N, light_N, slot_N = layer_N[n], heavy_N[n], light_N[n], slot_N[n]
    expert_N = ids[layer_N, heavy_N, given_N[n]]
    np.subtract.at(share, (layer_N, heavy_N, given_N[n]), passed_N[n])
    ids[layer_N, light_N, slot_N] = expert_N
    share[layer_N, light_N, slot_N] = passed_N[n]
    return len(n)


def _expert_to_give(shares: Shares, pairs: Pairs) -> tuple[Ints, Floats]:
    """Slot of the heavy actor and its share: the largest that is not on the light one.

    A second light actor gets the same expert only if that has enough for both.
    """
    ids_NS = shares.ids_LPS[pairs.layer_N, pairs.heavy_N]
    share_NS = shares.share_LPS[pairs.layer_N, pairs.heavy_N]
    theirs_NS = shares.ids_LPS[pairs.layer_N, pairs.light_N]
    order_NC = np.argsort(-share_NS, axis=1, kind="stable")[:, :LOOKED_AT]
    ids_NC = np.take_along_axis(ids_NS, order_NC, axis=1)
    there_NC = (ids_NC[:, :, None] == theirs_NS[:, None, :]).any(2) | (ids_NC == FREE)
    share_NC = np.where(there_NC, -1.0, np.take_along_axis(share_NS, order_NC, axis=1))
    again_NC = np.argsort(-share_NC, axis=1, kind="stable")
    index_N = np.arange(len(ids_NS))
    best_N = share_NC[index_N, again_NC[:, 0]]
    enough_N = best_N > (pairs.nth_N + 1) * pairs.amount_N
    nth_N = np.where(enough_N, 0, np.minimum(pairs.nth_N, order_NC.shape[1] - 1))
    chosen_N = again_NC[index_N, nth_N]
    return order_NC[index_N, chosen_N], share_NC[index_N, chosen_N]


def _slot_to_use(shares: Shares, layer_N: Ints, light_N: Ints) -> tuple[Ints, Floats, Floats]:
    """Slot of the light actor, the share that is lost there, and its price (inf: none can go)."""
    ids_NS = shares.ids_LPS[layer_N, light_N]
    share_NS = shares.share_LPS[layer_N, light_N]
    free_NS = ids_NS == FREE
    count_NS = shares.count_LE[layer_N[:, None], np.where(free_NS, 0, ids_NS)]
    price_NS = share_NS + STRANDING * _strands(shares)[layer_N, light_N]
    price_NS = np.where(free_NS, -1.0, np.where(count_NS > 1, price_NS, np.inf))
    slot_N = price_NS.argmin(1)
    index_N = np.arange(len(slot_N))
    return slot_N, share_NS[index_N, slot_N], price_NS[index_N, slot_N]


def _strands(shares: Shares) -> Bools:
    """[L, P, S]: without this copy another actor could not exchange load with anyone."""
    lonely_C = shares.degree_LP.reshape(-1)[shares.actor_C] == 1
    lonely_G = np.bincount(shares.group_C, lonely_C, len(shares.size_G))
    others_C = lonely_G[shares.group_C] - lonely_C
    strands = np.zeros(shares.ids_LPS.size, bool)
    strands[shares.slot_C] = (others_C > 0) & (shares.size_G[shares.group_C] == 2)
    return strands.reshape(shares.ids_LPS.shape)


def swap(shares: Shares, pairs: Pairs) -> int:
    """Exchanges the two experts of each pair whose shares differ by nearest the right amount.

    Changes the table and the shares (not the loads) in place; returns how many pairs.
    """
    first_N = pairs.nth_N == 0  # one at a time for a heavy actor: its slots must not be used twice
    layer_N, heavy_N, light_N, _, amount_N = (column[first_N] for column in pairs)
    if not len(layer_N):
        return 0
    ids, share = shares.ids_LPS, shares.share_LPS
    ours_NC, ours_ids_NC, ours_share_NC = _spread(ids[layer_N, heavy_N], share[layer_N, heavy_N])
    theirs_NC, theirs_ids_NC, theirs_share_NC = _spread(
        ids[layer_N, light_N], share[layer_N, light_N]
    )
    stuck_NC = _held_in(ours_ids_NC, ids[layer_N, light_N])
    theirs_stuck_NC = _held_in(theirs_ids_NC, ids[layer_N, heavy_N])
    error_NCC = np.abs(
        ours_share_NC[:, :, None] - theirs_share_NC[:, None, :] - amount_N[:, None, None]
    )
    error_NCC = np.where(stuck_NC[:, :, None] | theirs_stuck_NC[:, None, :], np.inf, error_NCC)
    error_NQ = error_NCC.reshape(len(layer_N), -1)
    best_N = error_NQ.argmin(1)
    n = np.flatnonzero(error_NQ[np.arange(len(best_N)), best_N] < 0.7 * amount_N)
    ours_N, theirs_N = np.divmod(best_N[n], theirs_NC.shape[1])
    give = layer_N[n], heavy_N[n], ours_NC[n, ours_N]
    take = layer_N[n], light_N[n], theirs_NC[n, theirs_N]
    for values in (ids, share):
        values[give], values[take] = values[take], values[give]
    return len(n)


def _spread(ids_NS: Ints, share_NS: Floats) -> tuple[Ints, Ints, Floats]:
    """At most 2 * LOOKED_AT slots of each actor, evenly over their shares: slots, ids, shares."""
    slots = ids_NS.shape[1]
    if slots <= 2 * LOOKED_AT:
        return np.broadcast_to(np.arange(slots), ids_NS.shape), ids_NS, share_NS
    order_NS = np.argsort(share_NS, axis=1, kind="stable")
    slot_NC = order_NS[:, np.linspace(0, slots - 1, 2 * LOOKED_AT).astype(np.int64)]
    return (
        slot_NC,
        np.take_along_axis(ids_NS, slot_NC, axis=1),
        np.take_along_axis(share_NS, slot_NC, axis=1),
    )


def _held_in(ids_NC: Ints, held_NS: Ints) -> Bools:
    """[N, C]: the expert is in the other row too, or is none."""
    there: Bools = (ids_NC[:, :, None] == held_NS[:, None, :]).any(2) | (ids_NC == FREE)
    return there


def _nth_in_run(key_N: Ints) -> Ints:
    """0, 1, 2, ... within each run of equal keys."""
    index_N = np.arange(len(key_N))
    starts_N = np.concatenate([[True], key_N[1:] != key_N[:-1]])[: len(key_N)]
    return index_N - np.maximum.accumulate(np.where(starts_N, index_N, 0))


def _first_of_each(key_N: Ints, chosen: Ints) -> Ints:
    """Of the chosen indices, those that are the first with their key."""
    _, first = np.unique(key_N[chosen], return_index=True)
    return chosen[np.sort(first)]
