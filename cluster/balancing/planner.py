"""`balance`: from measured loads and the placement of today to one that moves little.

Loads of copies are compared as the per-step choice of copies can share them, not evenly: an expert
with two copies lets load flow between two actors, so most noise and drift needs no move at all.
What the next window may add where nobody can take it (islands.py) counts like load. Layers whose
heaviest actor is then above `limit` are repaired (repair.py), others stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.homes import homes
from expertmesh.cluster.balancing.intake import check_held, check_input, mended
from expertmesh.cluster.balancing.plan import Plan
from expertmesh.cluster.balancing.repair import copy_to_light, swap, trade
from expertmesh.cluster.balancing.shares import Bools, Shares
from expertmesh.cluster.balancing.table import (
    FREE,
    Floats,
    Ids,
    changed_rows,
    over_ranks,
    to_table,
)
from expertmesh.cluster.groups.types import Groups
from expertmesh.cluster.placement import Placement
from expertmesh.cluster.spares import place_spares


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """limit, goal: load of a layer's heaviest actor that asks for moves, and load down to which an
    actor gives copies; in mean loads, with what the next window may add.

    slack: load, in mean loads of an actor, that every copy keeps in the forecast, so that some can
    flow away when a step differs from it; more of it means more moves and steadier steps.
    rounds: at most, each gives every light actor at most one copy. first_sweeps, sweeps: of
    levelling, for the old placement and per round. fill: free slots get copies.
    """

    limit: float = 1.03
    goal: float = 1.02
    slack: float = 0.025
    rounds: int = 20
    first_sweeps: int = 12
    sweeps: int = 4
    fill: bool = True


FAR, FIRST_GOAL = 1.06, 1.01
"""Load above which a layer is far from balance, and the goal of its rounds that see loads only: who
gives a copy gives enough."""

RISKS_FROM, SHUFFLES_FROM, SWAPS_FROM = 2, 3, 4
"""Rounds of layers that are far. Copies move half as much as swaps and trades do: so they begin,
for loads alone, then also for what the next window may add, then between other pairs of actors
than those in order of load. Layers that are near skip the first, and swap from round NEAR_FROM."""
NEAR_FROM = 1

IDLE_ROUNDS = 3
"""So many without a change end the search: the partners that are tried next differ."""


def balance(
    loads_LE: NDArray[np.number],
    old: Placement,
    *,
    slots: int,
    ranks: int | None = None,
    leaving: frozenset[int] = frozenset(),
    groups: Groups | None = None,
    settings: BalanceSettings | None = None,
) -> Plan:
    """A placement for the loads of the last window(s), near the old one.

    loads_LE: hits of each expert, layers in the order of old.held. ranks: actors afterwards, the
    new ones start empty. leaving: actors that must end empty; they keep their number. slots: per
    actor and layer. groups: experts that should rather stay together.
    Pure and deterministic. Where all loads are equal only free slots are filled, and without any
    load nothing changes, unless actors come or go. Raises BalanceError for impossible input.
    """
    settings = settings or BalanceSettings()
    ranks = old.actors if ranks is None else ranks
    floats_LE: Floats = np.asarray(loads_LE, np.float64)
    staying = [actor for actor in range(ranks) if actor not in leaving]
    check_input(floats_LE, old, slots, ranks, staying)
    layers, mended_L = mended(old, slots, ranks, staying)
    table_LPS = to_table(layers, len(staying), slots)
    check_held(table_LPS, tuple(old.held), floats_LE.shape[1])
    idle_L = ~mended_L & (table_LPS[:, :, 0] != FREE).all(1)  # nobody comes, goes or starts
    keep_L = idle_L & (floats_LE.max(1) == 0.0)
    steady_L = idle_L & (floats_LE.max(1) == floats_LE.min(1))
    home_LE = None if groups is None else homes(groups, old.held, table_LPS)
    start = partial(Shares, load_LE=_relative(floats_LE, len(staying)), home_LE=home_LE)
    new_LPS, before_L, after_L = _improved(
        start, table_LPS.astype(np.int32), ~keep_L, ~steady_L, settings
    )
    rows = changed_rows(layers, table_LPS, new_LPS)
    held = {
        layer: over_ranks(actors, staying, ranks)
        for layer, actors in zip(old.held, rows, strict=True)
    }
    return Plan(old, Placement(held), before_L, after_L)


def _relative(loads_LE: Floats, actors: int) -> Floats:
    """In units of the mean load of an actor; a layer without load as if all experts had some."""
    total_L1 = loads_LE.sum(1, keepdims=True)
    loads_LE = np.where(total_L1 > 0.0, loads_LE, 1.0)
    relative_LE: Floats = loads_LE * (actors / loads_LE.sum(1, keepdims=True))
    return relative_LE


def _improved(
    start: Callable[..., Shares],
    table_LPS: Ids,
    fill_L: Bools,
    repair_L: Bools,
    settings: BalanceSettings,
) -> tuple[Ids, Floats, Floats]:
    """(table, imbalance of each layer before, after)."""
    shares = start(table_LPS.copy(), slack=settings.slack)
    _settle(shares, settings.first_sweeps)
    before_L = shares.load_LP.max(1)
    if settings.fill and (fill_L & (table_LPS == FREE).any((1, 2))).any():
        filled_LPS = _filled(table_LPS, shares.load_LE, fill_L)
        shares = start(filled_LPS, slack=settings.slack)
        _settle(shares, settings.first_sweeps)
    best_LPS, after_L = shares.ids_LPS.copy(), shares.load_LP.max(1)
    least_L = shares.strain_LP.max(1)
    far_L = shares.load_LP.max(1) > FAR
    at_O = np.arange(len(table_LPS))  # the layers of `shares`
    open_L = repair_L & (least_L > settings.limit)
    idle = 0
    for turn in range(settings.rounds):
        if not open_L.all():
            shares.keep(np.flatnonzero(open_L))
            at_O = at_O[open_L]
            far_L = far_L[open_L]
            shares.index()
        if not len(at_O) or idle == IDLE_ROUNDS:
            break
        idle = 0 if _turn(shares, turn, far_L, settings) else idle + 1
        assert shares.count_K.all(), "an expert lost its last copy"
        strain_L = shares.strain_LP.max(1)
        better_L = strain_L < least_L[at_O]
        least_L[at_O[better_L]] = strain_L[better_L]
        after_L[at_O[better_L]] = shares.load_LP[better_L].max(1)
        best_LPS[at_O[better_L]] = shares.ids_LPS[better_L]
        open_L = least_L[at_O] > settings.limit
    return best_LPS, before_L, after_L


def _filled(table_LPS: Ids, load_LE: Floats, chosen_L: Bools) -> Ids:
    """The table with copies in the free slots of the chosen layers."""
    free_LP = (table_LPS == FREE).sum(2)
    layers = np.flatnonzero(chosen_L & free_LP.any(1))
    if not len(layers):
        return table_LPS
    filled_LPS = table_LPS.copy()
    for layer in layers:
        ids_PS = filled_LPS[layer]
        holds_PE = np.zeros((len(ids_PS), load_LE.shape[1]), bool)
        actor_C, slot_C = np.nonzero(ids_PS != FREE)
        holds_PE[actor_C, ids_PS[actor_C, slot_C]] = True
        begin_P = ids_PS.shape[1] - free_LP[layer]
        for actor, expert in place_spares(holds_PE, load_LE[layer], free_LP[layer]):
            ids_PS[actor, begin_P[actor]] = expert
            begin_P[actor] += 1
    return filled_LPS


def _turn(shares: Shares, turn: int, far_L: Bools, settings: BalanceSettings) -> int:
    """One round of every kind that is due; returns how many changes.

    Where loads are far from even each kind needs to know what the one before has done. Near that
    they meet so seldom that one levelling after all of them will do.
    """
    attempt = max(0, turn + 1 - SHUFFLES_FROM)
    load_LP, goal_L = shares.strain_LP, np.full(len(far_L), settings.goal)
    if turn < RISKS_FROM:
        load_LP[far_L] = shares.load_LP[far_L]
        goal_L[far_L] = FIRST_GOAL
    changed = copy_to_light(shares, load_LP, goal_L[:, None], attempt)
    if turn >= SWAPS_FROM or (turn >= NEAR_FROM and not far_L.all()):
        for kind in (trade, swap):
            if turn >= SWAPS_FROM and far_L.any():
                _settle(shares, settings.sweeps)
            load_LP = shares.strain_LP
            if turn < SWAPS_FROM:
                load_LP[far_L] = 1.0
            changed += kind(shares, load_LP, settings.limit, attempt)
    _settle(shares, settings.sweeps)
    return changed


def _settle(shares: Shares, sweeps: int) -> None:
    shares.index()
    shares.level(sweeps)
    shares.assess()
