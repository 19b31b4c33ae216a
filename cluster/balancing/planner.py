"""`balance`: from measured loads and the placement of today to one that moves little.

Loads of copies are compared as the per-step choice of copies can share them, not evenly: an expert
with two copies lets load flow between two actors, so most noise and drift needs no move at all.
Layers whose heaviest actor is above `limit` are repaired (repair.py) until it is at `goal`, others
stay as they are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.filling import fill
from expertmesh.cluster.balancing.plan import BalanceError, Plan, padded
from expertmesh.cluster.balancing.recovery import seat_orphans
from expertmesh.cluster.balancing.repair import copy_to_light, swap
from expertmesh.cluster.balancing.shares import Shares
from expertmesh.cluster.balancing.table import FREE, Floats, Ints, Rows, to_table
from expertmesh.cluster.groups.types import Groups
from expertmesh.cluster.placement import Placement


@dataclass(frozen=True, slots=True)
class BalanceSettings:
    """limit, goal: max/mean load of a layer's actors that asks for moves, and that ends them.

    slack: load, in mean loads of an actor, that every copy keeps in the forecast, so that some can
    flow away when a step differs from it; more of it means more moves and steadier steps.
    rounds: at most, each gives every light actor at most one copy. first_sweeps, sweeps: of
    levelling, for the old placement and per round. fill: free slots get copies.
    """

    limit: float = 1.02
    goal: float = 1.01
    slack: float = 0.03
    rounds: int = 12
    first_sweeps: int = 8
    sweeps: int = 5
    fill: bool = True


SWAPS_FROM = 3
"""Copies move half as much as swaps do; the first rounds do without."""


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
    Pure and deterministic. A layer without load, or with equal loads, keeps its placement unless
    actors come or go. Raises BalanceError for impossible input.
    """
    settings = settings or BalanceSettings()
    ranks = old.actors if ranks is None else ranks
    loads_LE = np.asarray(loads_LE, np.float64)
    staying = [actor for actor in range(ranks) if actor not in leaving]
    _check(loads_LE, old, slots, ranks, staying)
    layers, mended = _mended(old, slots, ranks, staying)
    table_LPS = to_table(layers, len(staying), slots)
    _check_held(table_LPS, tuple(old.held), loads_LE.shape[1])
    steady_L = _steady(loads_LE, table_LPS) & ~mended
    relative_LE = _relative(loads_LE, len(staying))
    new_LPS, before_L, after_L = _improved(table_LPS, relative_LE, ~steady_L, settings)
    rows = _rows(layers, table_LPS, new_LPS)
    held = {
        layer: _over_ranks(actors, staying, ranks)
        for layer, actors in zip(old.held, rows, strict=True)
    }
    return Plan(old, Placement(held), before_L, after_L)


def _improved(
    table_LPS: Ints, load_LE: Floats, open_L: NDArray[np.bool_], settings: BalanceSettings
) -> tuple[Ints, Floats, Floats]:
    """(table, imbalance before, after). Only layers in open_L change."""
    shares = Shares(table_LPS.copy(), load_LE, settings.slack)
    shares.open(open_L)
    shares.level(settings.first_sweeps)
    before_L = _imbalance(shares)
    if settings.fill and (free_L := (table_LPS == FREE).any((1, 2)) & open_L).any():
        filled_LPS = table_LPS.copy()
        fill(filled_LPS, load_LE, free_L)
        shares = Shares(filled_LPS, load_LE, settings.slack)
        shares.open(open_L)
        shares.level(settings.first_sweeps)
    best_LPS, after_L = shares.ids_LPS.copy(), _imbalance(shares)
    for turn in range(settings.rounds):
        todo_L = open_L & (after_L > settings.limit)
        if not todo_L.any():
            break
        shares.open_L = todo_L
        changed = copy_to_light(shares, settings.goal)
        shares.open(todo_L)
        shares.level(settings.sweeps)
        if turn >= SWAPS_FROM or not changed:
            changed += swap(shares, settings.limit)
            shares.open(todo_L)
            shares.level(settings.sweeps)
        if not changed:
            break
        now_L = _imbalance(shares)
        better_L = todo_L & (now_L < after_L)
        after_L[better_L] = now_L[better_L]
        best_LPS[better_L] = shares.ids_LPS[better_L]
    return best_LPS, before_L, after_L


def _imbalance(shares: Shares) -> Floats:
    imbalance_L: Floats = shares.load_LP.max(1)
    return imbalance_L


def _relative(loads_LE: Floats, actors: int) -> Floats:
    """In units of the mean load of an actor; a layer without load as if all experts had some."""
    total_L1 = loads_LE.sum(1, keepdims=True)
    loads_LE = np.where(total_L1 > 0.0, loads_LE, 1.0)
    return loads_LE * (actors / loads_LE.sum(1, keepdims=True))


def _steady(loads_LE: Floats, table_LPS: Ints) -> NDArray[np.bool_]:
    """Layers whose loads say nothing and whose actors all hold something."""
    steady: NDArray[np.bool_] = (loads_LE.max(1) == loads_LE.min(1)) & (
        table_LPS[:, :, 0] >= 0
    ).all(1)
    return steady


def _mended(
    old: Placement, slots: int, ranks: int, staying: list[int]
) -> tuple[list[Rows], NDArray[np.bool_]]:
    """The layers over the staying actors, each expert held and no actor over its slots.

    Returns them and which ones had to change for that.
    """
    layers: list[Rows] = []
    mended = np.zeros(len(old.held), bool)
    for index, held in enumerate(old.held.values()):
        rows = padded(held, ranks)
        kept = tuple(rows[actor] for actor in staying)
        if len(staying) < ranks or max(map(len, kept)) > slots:
            cut = [list(ids[:slots]) for ids in kept]
            everything = {expert for ids in rows for expert in ids}
            orphans = sorted(everything.difference(*cut))
            seat_orphans(cut, orphans, slots)
            kept = tuple(map(tuple, cut))
            mended[index] = True
        layers.append(kept)
    return layers, mended


def _rows(layers: list[Rows], table_LPS: Ints, new_LPS: Ints) -> list[Rows]:
    """The layers of `table_LPS` with the actors changed that differ in the new one."""
    changed_LP = (table_LPS != new_LPS).any(2)
    new = iter(new_LPS[changed_LP].tolist())
    rows = list(layers)
    for index in np.flatnonzero(changed_LP.any(1)).tolist():
        actors = list(layers[index])
        for actor in np.flatnonzero(changed_LP[index]).tolist():
            actors[actor] = tuple(expert for expert in next(new) if expert != FREE)
        rows[index] = tuple(actors)
    return rows


def _over_ranks(rows: Rows, staying: list[int], ranks: int) -> Rows:
    if len(rows) == ranks:
        return rows
    of_actor = dict(zip(staying, rows, strict=True))
    return tuple(of_actor.get(actor, ()) for actor in range(ranks))


def _check(loads_LE: Floats, old: Placement, slots: int, ranks: int, staying: list[int]) -> None:
    layers = tuple(old.held)
    if loads_LE.ndim != 2 or len(loads_LE) != len(layers) or not loads_LE.size:
        raise BalanceError(
            f"loads have shape {list(loads_LE.shape)}: [{len(layers)} layers, experts] is needed"
        )
    bad = ~(np.isfinite(loads_LE) & (loads_LE >= 0))
    if bad.any():
        layer, expert = np.argwhere(bad)[0]
        raise BalanceError(
            f"the load of layer {layers[layer]} expert {expert} is {loads_LE[layer, expert]}"
        )
    if ranks < old.actors:
        raise BalanceError(
            f"{ranks} ranks are fewer than the {old.actors} of today: name who leaves"
        )
    experts = loads_LE.shape[1]
    if len(staying) * slots < experts:
        needed = -(-experts // len(staying)) if staying else experts
        raise BalanceError(
            f"{len(staying)} actors with {slots} slots cannot hold {experts} experts per layer: "
            f"at least {needed} slots each are needed"
        )


def _check_held(table_LPS: Ints, layers: tuple[int, ...], experts: int) -> None:
    if table_LPS.max() >= experts:
        at = int((table_LPS.max((1, 2)) >= experts).argmax())
        raise BalanceError(
            f"layer {layers[at]} holds expert {table_LPS[at].max()} and loads name {experts} experts"
        )
    flat = table_LPS + (np.arange(len(layers)) * experts)[:, None, None]
    count = np.bincount(flat[table_LPS >= 0], minlength=len(layers) * experts)
    if not count.all():
        layer, expert = divmod(int(count.argmin()), experts)
        raise BalanceError(f"layer {layers[layer]}: no actor holds expert {expert}")
