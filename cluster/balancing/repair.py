"""Small changes to a table that even out the loads, many layers and actors at once.

A step pairs actors that have too much with actors that have too little and changes one slot per
light actor. `copy_to_light` gives it another copy of an expert of the heavy one, in a free slot or
in place of a copy that others can do without: one expert moves, and the two actors can share its
load from then on. `swap` exchanges two experts, where no copy can go: two experts move.

Letters as in shares.py. N: pairs of a heavy and a light actor. Q: experts looked at.
"""

from typing import NamedTuple

import numpy as np

from expertmesh.cluster.balancing.shares import Bools, Shares
from expertmesh.cluster.balancing.table import FREE, Floats, Ints

LOOKED_AT = 32
"""Experts of an actor that a step considers."""
LEAST = 0.1
"""Load, in mean loads of an actor, below which a heavy actor's excess is not split over several."""
STRANDING = 0.5
"""Price, in mean loads of an actor, of dropping the only copy another actor shares load through."""
WORTH = 1.5
"""A copy must take this many times the load that the dropped one sends away."""
SHUFFLE, MOST, RELAY = 0.05, 0.5, 1.05
"""Where pairs in order of load did not do: how far apart in load actors change places in that
order in the first attempt and at most, and up to which load an actor may take a copy, to pass load
on."""
GOLDEN = 0.6180339887498949
"""Its multiples, less their whole part, spread evenly."""
HOME = 0.05
"""Price, in mean loads of an actor, of taking an expert from where most of its group is."""


class Pairs(NamedTuple):
    """Flat actors; a light one is in one pair only. nth_N: of the heavy one's pairs, from 0.

    amount_N: load that should pass.
    """

    heavy_N: Ints
    light_N: Ints
    nth_N: Ints
    amount_N: Floats


def copy_to_light(shares: Shares, load_LP: Floats, goal: float | Floats, attempt: int = 0) -> int:
    """One round of copies; returns how many. load_LP: of the actors, as it is to be compared."""
    pairs = _pairs_by_load(load_LP, goal, _able(shares), attempt)
    if not len(pairs.heavy_N):
        return 0
    given_N, share_N = _expert_to_give(shares, pairs)
    slot_N, gone_share_N, price_N = _slot_to_use(shares, pairs.light_N)
    passed_N = np.minimum(share_N, pairs.amount_N + gone_share_N)
    worth_N = (share_N > 0.0) & (passed_N > WORTH * gone_share_N) & np.isfinite(price_N)
    n = np.flatnonzero(worth_N)
    n = n[_safe_together(shares, slot_N[n])]
    key_N = shares.key_LPS.reshape(-1)[given_N[n]]
    shares.take(given_N[n], passed_N[n])
    shares.put(slot_N[n], key_N, passed_N[n])
    return len(n)


def trade(shares: Shares, load_LP: Floats, goal: float | Floats, attempt: int = 0) -> int:
    """One round of copies to light actors that can spare none of theirs, later to any; returns how
    many.

    The light one gets a copy of an expert of the heavy one, and that takes over an expert of the
    light one in place of a copy it can do without.
    """
    pairs = _pairs_by_load(load_LP, goal, ~_able(shares) | (attempt > 0), attempt)
    first_N = pairs.nth_N == 0  # a heavy actor's slots must not be used twice
    pairs = Pairs(*(column[first_N] for column in pairs))
    if not len(pairs.heavy_N):
        return 0
    given_N, share_N = _expert_to_give(shares, pairs)
    gone_N, _, price_N = _slot_to_use(shares, pairs.heavy_N, given_N)
    slot_NS = _slots_of(shares, pairs.light_N)
    share_NS = np.where(_held_by(shares, slot_NS, pairs.heavy_N), np.inf, shares.share_F[slot_NS])
    if shares.homes:
        share_NS += HOME * shares.at_home(slot_NS)
    n, best_N = np.arange(len(slot_NS)), share_NS.argmin(1)
    back_N, back_share_N = slot_NS[n, best_N], share_NS[n, best_N]
    passed_N = np.minimum(share_N, pairs.amount_N + back_share_N)
    n = np.flatnonzero(np.isfinite(price_N) & (passed_N > back_share_N + pairs.amount_N / 4))
    n = n[_safe_together(shares, gone_N[n])]
    key_F = shares.key_LPS.reshape(-1)
    key_N = np.concatenate([key_F[back_N[n]], key_F[given_N[n]]])
    shares.take(given_N[n], passed_N[n])
    shares.put(
        np.concatenate([gone_N[n], back_N[n]]),
        key_N,
        np.concatenate([back_share_N[n], passed_N[n]]),
    )
    return len(n)


def swap(shares: Shares, load_LP: Floats, goal: float | Floats, attempt: int = 0) -> int:
    """One round of swaps; returns how many.

    The experts of a pair whose shares differ by nearest the right amount change places.
    """
    pairs = _pairs_by_load(load_LP, goal, np.ones(load_LP.shape, bool), attempt)
    first_N = pairs.nth_N == 0  # a heavy actor's slots must not be used twice
    heavy_N, light_N, _, amount_N = (column[first_N] for column in pairs)
    ours_NQ, theirs_NQ = _spread(shares, heavy_N), _spread(shares, light_N)
    stuck_NQ = _held_by(shares, ours_NQ, light_N)
    theirs_stuck_NQ = _held_by(shares, theirs_NQ, heavy_N)
    share_F = shares.share_F
    passes_NQQ = share_F[ours_NQ][:, :, None] - share_F[theirs_NQ][:, None, :]
    error_NQQ = np.abs(passes_NQQ - amount_N[:, None, None])
    if shares.homes:
        error_NQQ += HOME * shares.at_home(ours_NQ)[:, :, None]
        error_NQQ += HOME * shares.at_home(theirs_NQ)[:, None, :]
    error_NQQ[stuck_NQ[:, :, None] | theirs_stuck_NQ[:, None, :]] = np.inf
    error_NX = error_NQQ.reshape(len(heavy_N), ours_NQ.shape[1] * theirs_NQ.shape[1])
    best_N = error_NX.argmin(1) if len(heavy_N) else np.zeros(0, np.int64)
    n = np.flatnonzero(error_NX[np.arange(len(best_N)), best_N] < 0.7 * amount_N)
    ours_N, theirs_N = np.divmod(best_N[n], theirs_NQ.shape[1])
    slot_N = np.concatenate([ours_NQ[n, ours_N], theirs_NQ[n, theirs_N]])
    other_N = np.roll(slot_N, len(n))
    shares.put(slot_N, shares.key_LPS.reshape(-1)[other_N], share_F[other_N])
    return len(n)


def _able(shares: Shares) -> Bools:
    """[L, P]: the actor has a free slot, or a copy that is not the only one."""
    free_LP = shares.ids_LPS[:, :, -1] == FREE
    able_LP: Bools = (shares.degree_A > 0).reshape(free_LP.shape) | free_LP
    return able_LP


def _pairs_by_load(
    load_LP: Floats, goal: float | Floats, able_LP: Bools, attempt: int = 0
) -> Pairs:
    """Pours the excess of the heaviest into the room of the lightest, in order (the north-west
    corner of the transport problem).

    An actor counts as heavy above `goal`, and as light below 1 if it is able to take something.
    attempt: 0 is in order of load, others try other partners and those that can pass load on.
    """
    layers, actors = load_LP.shape
    row_L1 = np.arange(layers)[:, None]
    order_LP, ceiling = load_LP, 1.0
    if attempt:
        order_LP = load_LP + min(SHUFFLE * attempt, MOST) * (
            np.arange(actors) * GOLDEN * attempt % 1.0
        )
        ceiling = RELAY
    lightest_LP = np.argsort(order_LP, axis=1, kind="stable")
    sorted_LP = load_LP[row_L1, lightest_LP]
    takes_LP = able_LP[row_L1, lightest_LP] & (sorted_LP <= goal)
    room_LP = np.maximum(ceiling - sorted_LP, 0.0) * takes_LP
    heaviest_first_LP = sorted_LP[:, ::-1]
    excess_LP = np.where(heaviest_first_LP > goal, heaviest_first_LP - 1.0, 0.0)
    # One searchsorted over all layers: each layer's sums lie in a range of their own.
    offset_L1 = row_L1 * 4.0 * actors
    poured_LP = np.cumsum(excess_LP, axis=1) + offset_L1
    middle_LP = np.cumsum(room_LP, axis=1) - room_LP / 2 + offset_L1
    nth_heavy_LP = np.searchsorted(poured_LP.reshape(-1), middle_LP.reshape(-1), side="right")
    nth_heavy_LP = nth_heavy_LP.reshape(load_LP.shape) - row_L1 * actors
    row_N, nth_light_N = np.nonzero((room_LP > 0.0) & (nth_heavy_LP < actors))
    nth_heavy_N = nth_heavy_LP[row_N, nth_light_N]
    nth_N = _nth_in_run(row_N * actors + nth_heavy_N)
    excess_N = excess_LP[row_N, nth_heavy_N]
    n = np.flatnonzero(excess_N > nth_N * LEAST)
    row_N, nth_light_N, nth_heavy_N = row_N[n], nth_light_N[n], nth_heavy_N[n]
    nth_N, excess_N, room_N = nth_N[n], excess_N[n], room_LP[row_N, nth_light_N]
    run_N = np.cumsum(nth_N == 0) - 1
    part_N = excess_N * room_N / np.bincount(run_N, room_N)[run_N]
    base_N = row_N * actors
    return Pairs(
        base_N + lightest_LP[row_N, actors - 1 - nth_heavy_N],
        base_N + lightest_LP[row_N, nth_light_N],
        nth_N,
        # More than fits passes on to those with whom the light actor shares other experts.
        np.minimum(part_N, np.maximum(room_N, (excess_N + room_N) / 2)),
    )


def _expert_to_give(shares: Shares, pairs: Pairs) -> tuple[Ints, Floats]:
    """Flat slot of the heavy actor and its share: the largest that is not on the light one.

    A second light actor gets the same expert only if that has enough for both.
    """
    slot_NQ = _slots_of(shares, pairs.heavy_N)
    share_NQ = shares.share_F[slot_NQ]
    if share_NQ.shape[1] > LOOKED_AT:
        top_NQ = np.argpartition(-share_NQ, LOOKED_AT, axis=1)[:, :LOOKED_AT]
        slot_NQ = np.take_along_axis(slot_NQ, top_NQ, axis=1)
        share_NQ = np.take_along_axis(share_NQ, top_NQ, axis=1)
    share_NQ[_held_by(shares, slot_NQ, pairs.light_N)] = -1.0
    n = np.arange(len(slot_NQ))
    best_N = share_NQ.argmax(1)
    again = np.flatnonzero((pairs.nth_N > 0) & (share_NQ[n, best_N] <= _wanted(pairs)))
    order_NQ = np.argsort(-share_NQ[again], axis=1, kind="stable")
    nth_N = np.minimum(pairs.nth_N[again], share_NQ.shape[1] - 1)
    best_N[again] = order_NQ[np.arange(len(again)), nth_N]
    return slot_NQ[n, best_N], share_NQ[n, best_N]


def _wanted(pairs: Pairs) -> Floats:
    """What this and the earlier pairs of the heavy actor would take of one expert."""
    return (pairs.nth_N + 1) * pairs.amount_N


def _slot_to_use(
    shares: Shares, actor_N: Ints, but_N: Ints | None = None
) -> tuple[Ints, Floats, Floats]:
    """Flat slot of the actor, other than but_N, its share that must go elsewhere, and the price of
    that (inf: no slot can be used)."""
    slot_NS = _slots_of(shares, actor_N)
    share_NS = shares.share_F[slot_NS]
    price_F = np.full(len(shares.share_F), np.inf)
    price_F[shares.slot_C] = shares.share_F[shares.slot_C] + STRANDING * _strands_C(shares)
    if shares.homes:
        price_F[shares.slot_C] += HOME * shares.at_home(shares.slot_C)
    price_NS = price_F[slot_NS]
    price_NS[shares.ids_LPS.reshape(-1)[slot_NS] == FREE] = -1.0
    if but_N is not None:
        price_NS[slot_NS == but_N[:, None]] = np.inf
    n, best_N = np.arange(len(slot_NS)), price_NS.argmin(1)
    return slot_NS[n, best_N], share_NS[n, best_N], price_NS[n, best_N]


def _strands_C(shares: Shares) -> Bools:
    """Without this copy another actor could not exchange load with anyone."""
    lonely_C = shares.degree_A[shares.actor_C] == 1
    lonely_G = np.bincount(shares.group_C, lonely_C, len(shares.size_G))
    strands: Bools = (lonely_G[shares.group_C] > lonely_C) & (shares.size_G[shares.group_C] == 2)
    return strands


def _safe_together(shares: Shares, slot_N: Ints) -> Ints:
    """Of the flat slots, those whose copies may go at once: one of each expert stays, and no actor
    loses more than one of the copies through which it exchanges load."""
    alone_N = -1 - np.arange(len(slot_N))  # keys of their own
    free_N = shares.ids_LPS.reshape(-1)[slot_N] == FREE
    key_N = np.where(free_N, alone_N, shares.key_LPS.reshape(-1)[slot_N])
    spare_N = np.where(free_N, 1, shares.count_K[key_N] - 1)
    kept_N = _nth_of_key(key_N) < spare_N
    # Only drops that happen count, and only copies in pairs have a partner.
    sum_G = np.bincount(shares.group_C, shares.actor_C, len(shares.size_G)).astype(np.int64)
    partner_F = np.zeros(len(shares.share_F), np.int64)
    partner_F[shares.slot_C] = sum_G[shares.group_C] - shares.actor_C
    partner_N = np.where(kept_N & (spare_N == 1) & ~free_N, partner_F[slot_N], alone_N)
    return np.flatnonzero(kept_N & (_nth_of_key(partner_N) == 0))


def _slots_of(shares: Shares, actor_N: Ints) -> Ints:
    """[N, S] flat slots."""
    slots = shares.ids_LPS.shape[2]
    slot_NS: Ints = actor_N[:, None] * slots + np.arange(slots)
    return slot_NS


def _spread(shares: Shares, actor_N: Ints) -> Ints:
    """[N, Q] flat slots of each actor, at most LOOKED_AT, evenly over their shares."""
    slot_NS = _slots_of(shares, actor_N)
    slots = slot_NS.shape[1]
    if slots <= LOOKED_AT:
        return slot_NS
    order_NS = np.argsort(shares.share_F[slot_NS], axis=1, kind="stable")
    chosen = np.linspace(0, slots - 1, LOOKED_AT).astype(np.int64)
    return np.take_along_axis(slot_NS, order_NS[:, chosen], axis=1)


def _held_by(shares: Shares, slot_NQ: Ints, actor_N: Ints) -> Bools:
    """[N, Q]: the actor holds the expert of that slot too, or there is none."""
    ids_F = shares.ids_LPS.reshape(-1)
    ids_QN = ids_F.take(slot_NQ.T)
    slots = shares.ids_LPS.shape[2]
    held_QN: Bools = ids_QN == FREE
    for slot in range(slots):
        held_QN |= ids_QN == ids_F.take(actor_N * slots + slot)
    return held_QN.T


def _nth_of_key(key_N: Ints) -> Ints:
    """How many earlier entries have the same key."""
    order_N = np.argsort(key_N, kind="stable")
    nth_N = np.empty_like(order_N)
    nth_N[order_N] = _nth_in_run(key_N[order_N])
    return nth_N


def _nth_in_run(key_N: Ints) -> Ints:
    """0, 1, 2, ... within each run of equal keys."""
    index_N = np.arange(len(key_N))
    starts_N = np.concatenate([[True], key_N[1:] != key_N[:-1]])[: len(key_N)]
    nth_N: Ints = index_N - np.maximum.accumulate(np.where(starts_N, index_N, 0))
    return nth_N
