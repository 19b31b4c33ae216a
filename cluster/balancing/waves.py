"""Make before break: a plan cut into waves, after each of which the mesh can serve for ever.

A wave copies some experts beside what is held, flips the routing to include them, then forgets
what they replace. A full actor takes a copy only together with a drop that is safe by then: of an
expert that has another copy, or gets one in the same wave. Such units of moves and drops are found
per layer (`_units`) and packed into waves over all layers (`_pack`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from expertmesh.cluster.balancing.plan import BalanceError, Drop, Move, Plan, holders, padded
from expertmesh.cluster.placement import Placement

Pair = tuple[int, int]
"""(expert, actor)"""


@dataclass(frozen=True, slots=True)
class Wave:
    """rounds: the copies to make; in a round each actor talks to at most one peer.

    placement: what is routed once all copies are verified; then the drops are forgotten.
    """

    rounds: tuple[tuple[Move, ...], ...]
    drops: tuple[Drop, ...]
    placement: Placement

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(move for batch in self.rounds for move in batch)


@dataclass(slots=True)
class _Unit:
    """What must happen in one wave, of one layer."""

    adds: list[Pair]
    drops: list[Pair]

    def touches(self) -> set[Pair | int]:
        """Experts as pairs with -1, and actors: units that share one keep their order."""
        pairs = self.adds + self.drops
        return {actor for _, actor in pairs} | {(expert, -1) for expert, _ in pairs}


_Touching = tuple[_Unit, set[Pair | int]]


def schedule(plan: Plan, old: Placement, slots: int, staging: int = 1) -> tuple[Wave, ...]:
    """The waves that lead from `old` to the plan's placement.

    In a wave an actor is the target of at most `staging` copies over all layers, and holds at most
    slots + staging experts of a layer until the drops, slots after them. A copy comes from an actor
    that held the expert when the wave began. Raises BalanceError if the plan is not valid.
    """
    if staging < 1:
        raise BalanceError(f"staging must be at least 1, not {staging}")
    units = {}
    for layer, after in plan.placement.held.items():
        before = padded(old.held[layer], len(after))
        if before != after:
            units[layer] = _units(layer, before, after, slots)
    return tuple(_waves(units, plan.placement, old, staging))


def _units(
    layer: int, before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...], slots: int
) -> list[_Unit]:
    """The layer's change as units that are valid one after the other."""
    state = _LayerState.between(before, after)
    crowded = next((actor for actor, ids in enumerate(after) if len(ids) > slots), None)
    unheld = set(state.copies) - {expert for ids in after for expert in ids}
    if crowded is not None or unheld:
        what = f"expert {min(unheld)} is nowhere" if unheld else f"actor {crowded} is over {slots}"
        raise BalanceError(f"layer {layer}: in the plan's placement {what}")
    units = []
    while any(state.adds):
        unit = state.next_unit(slots)
        state.apply(unit)
        units.append(unit)
    bringing = {expert: unit for unit in units for expert, _ in unit.adds}
    alone = _Unit([], [])  # spare copies that nothing replaces
    for actor, experts in enumerate(state.drops):
        for expert in sorted(experts):
            bringing.get(expert, alone).drops.append((expert, actor))
    return [*units, alone] if alone.drops else units


@dataclass(slots=True)
class _LayerState:
    """adds, drops: per actor, the experts still to come and to go. copies: routed ones, now."""

    sizes: list[int]
    adds: list[set[int]]
    drops: list[set[int]]
    copies: Counter[int]

    @classmethod
    def between(
        cls, before: tuple[tuple[int, ...], ...], after: tuple[tuple[int, ...], ...]
    ) -> "_LayerState":
        return cls(
            sizes=[len(ids) for ids in before],
            adds=[set(new) - set(had) for had, new in zip(before, after, strict=True)],
            drops=[set(had) - set(new) for had, new in zip(before, after, strict=True)],
            copies=Counter(expert for ids in before for expert in ids),
        )

    def apply(self, unit: _Unit) -> None:
        for expert, actor in unit.adds:
            self.adds[actor].discard(expert)
            self.copies[expert] += 1
            self.sizes[actor] += 1
        for expert, actor in unit.drops:
            self.drops[actor].discard(expert)
            self.copies[expert] -= 1
            self.sizes[actor] -= 1

    def next_unit(self, slots: int) -> _Unit:
        """An add that is possible now, else a cycle of them.

        A blocked actor is full and all its drops wait for their expert to arrive somewhere else:
        going from actor to the place its expert goes to either ends at an actor with room or
        comes back, and around a cycle everyone takes one copy and gives one up.
        """
        actor = next(actor for actor, experts in enumerate(self.adds) if experts)
        chain: list[tuple[int, int]] = []  # (expert that leaves the actor, actor)
        while actor not in (seen := [at for _, at in chain]):
            if self.sizes[actor] < slots or self._free(actor) is not None:
                return self._arrive(actor, chain[-1][0] if chain else min(self.adds[actor]), slots)
            leaving = min(self.drops[actor])
            chain.append((leaving, actor))
            actor = next(to for to, experts in enumerate(self.adds) if leaving in experts)
        cycle = chain[seen.index(actor) :]
        targets = [at for _, at in cycle[1:]] + [actor]
        return _Unit([(e, to) for (e, _), to in zip(cycle, targets, strict=True)], cycle)

    def _arrive(self, actor: int, expert: int, slots: int) -> _Unit:
        gone = None if self.sizes[actor] < slots else self._free(actor)
        return _Unit([(expert, actor)], [] if gone is None else [(gone, actor)])

    def _free(self, actor: int) -> int | None:
        """An expert the actor can drop at once, because another routed copy exists."""
        return min((e for e in self.drops[actor] if self.copies[e] > 1), default=None)


def _waves(
    units: dict[int, list[_Unit]], new: Placement, old: Placement, staging: int
) -> Iterator[Wave]:
    held = {
        layer: [list(ids) for ids in padded(old.held[layer], len(actors))]
        for layer, actors in new.held.items()
    }
    routed = {layer: tuple(map(tuple, rows)) for layer, rows in held.items()}
    waiting = {layer: [(unit, unit.touches()) for unit in some] for layer, some in units.items()}
    while any(waiting.values()):
        chosen = _pack(waiting, new.actors, staging)
        rounds = _rounds(_sourced(chosen, held))
        drops = []
        for layer, done in chosen.items():
            for unit in done:
                for expert, actor in unit.adds:
                    held[layer][actor].append(expert)
                for expert, actor in unit.drops:
                    held[layer][actor].remove(expert)
                    drops.append(Drop(layer, expert, actor))
            routed[layer] = _in_order(held[layer], new.held[layer])
        yield Wave(rounds, tuple(drops), Placement(dict(routed)))


def _in_order(
    rows: list[list[int]], final: tuple[tuple[int, ...], ...]
) -> tuple[tuple[int, ...], ...]:
    """Actors that hold what they shall hold list it as the plan does."""
    return tuple(
        ids if set(ids) == set(row) else tuple(row) for row, ids in zip(rows, final, strict=True)
    )


def _pack(waiting: dict[int, list[_Touching]], actors: int, staging: int) -> dict[int, list[_Unit]]:
    """Takes from `waiting` what one wave can hold.

    Units of one layer that share an actor or an expert keep their order and go in different
    waves: a later one may rely on what an earlier one brings.
    """
    room = [staging] * actors
    chosen: dict[int, list[_Unit]] = {}
    for layer, some in waiting.items():
        blocked: set[Pair | int] = set()
        later: list[_Touching] = []
        for unit, touched in some:
            if all(room[actor] for _, actor in unit.adds) and blocked.isdisjoint(touched):
                for _, actor in unit.adds:
                    room[actor] -= 1
                chosen.setdefault(layer, []).append(unit)
            else:
                later.append((unit, touched))
            blocked |= touched
        waiting[layer] = later
    return chosen


def _sourced(chosen: dict[int, list[_Unit]], held: dict[int, list[list[int]]]) -> list[Move]:
    """Each copy's source: of the actors that hold the expert now, the one asked least so far."""
    asked: Counter[int] = Counter()
    moves = []
    for layer, units in chosen.items():
        sources = holders(tuple(map(tuple, held[layer])))
        for unit in units:
            for expert, target in unit.adds:
                source = min(sources[expert], key=lambda actor: (asked[actor], actor))
                asked[source] += 1
                moves.append(Move(layer, expert, source, target))
    return moves


def _rounds(moves: list[Move]) -> tuple[tuple[Move, ...], ...]:
    """Greedy edge colouring: a move goes in the first round where both ends are free, or talk to
    each other the opposite way (a swap is one meeting)."""
    rounds: list[list[Move]] = []
    peers: list[dict[int, int]] = []
    for move in moves:
        ends = {move.source: move.target, move.target: move.source}
        for batch, peer in zip(rounds, peers, strict=True):
            one_meeting = all(peer.get(actor, other) == other for actor, other in ends.items())
            if one_meeting and all(other.target != move.target for other in batch):
                break
        else:
            batch, peer = [], {}
            rounds.append(batch)
            peers.append(peer)
        batch.append(move)
        peer.update(ends)
    return tuple(map(tuple, rounds))
