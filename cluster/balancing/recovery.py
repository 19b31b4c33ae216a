"""What survivors hold after deaths: experts without a copy take the place of spare copies."""

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from expertmesh.cluster.placement import Placement, PlacementError


class NoCapacity(PlacementError):
    """The survivors have too few slots. The message says how many experts have no room."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Actors are numbered anew: the survivors, in their old order.

    survivors: old number of each new one. loads, drops: new actor -> layer -> experts to load
    from elsewhere (no survivor holds them), and spare copies that go to make room for those.
    """

    placement: Placement
    survivors: tuple[int, ...]
    loads: Mapping[int, Mapping[int, tuple[int, ...]]]
    drops: Mapping[int, Mapping[int, tuple[int, ...]]]

    @property
    def orphans(self) -> int:
        """Experts, over all layers, that no survivor held."""
        return sum(len(ids) for layers in self.loads.values() for ids in layers.values())


def recover(
    old: Placement, lost: frozenset[int], slots: int, experts: int | None = None
) -> Recovery:
    """The placement without the actors `lost`, with every expert held.

    experts: per layer; unset: those that `old` names.

    No copy moves between survivors, so it can be served as soon as the orphans are loaded; what
    deserves more copies now is for the next plan. slots: per actor and layer.
    Raises NoCapacity when the experts do not fit.
    """
    survivors = tuple(actor for actor in range(old.actors) if actor not in lost)
    if experts is None:
        experts = max(len({e for ids in held for e in ids}) for held in old.held.values())
    _check_room(experts, len(survivors), slots)
    held, loads, drops = {}, _by_actor(len(survivors)), _by_actor(len(survivors))
    for layer, actors in old.held.items():
        rows = [list(actors[actor]) for actor in survivors]
        missing = sorted(set(range(experts)).difference(*rows))
        for expert, actor, gone in seat_orphans(rows, missing, slots):
            loads[actor].setdefault(layer, []).append(expert)
            if gone is not None:
                drops[actor].setdefault(layer, []).append(gone)
        held[layer] = tuple(tuple(row) for row in rows)
    return Recovery(Placement(held), survivors, _frozen(loads), _frozen(drops))


def seat_orphans(
    rows: list[list[int]], orphans: list[int], slots: int
) -> list[tuple[int, int, int | None]]:
    """Gives each orphan a slot; changes rows [actor][slot] in place.

    A free slot of the emptiest actor first; then the spare copy of the expert with most copies,
    on the actor with fewest orphans so far. The caller has seen to it that there is room.
    Returns (orphan, actor, expert whose copy went or None).
    """
    copies = Counter(expert for row in rows for expert in row)
    free = [(len(row), actor) for actor, row in enumerate(rows) if len(row) < slots]
    heapq.heapify(free)
    # Per actor, slots by copies of their expert; an entry is stale when the expert lost one since.
    spare = [
        [(-copies[expert], slot) for slot, expert in enumerate(row) if copies[expert] > 1]
        for row in rows
    ]
    for heap in spare:
        heapq.heapify(heap)
    taken = [0] * len(rows)
    seated: list[tuple[int, int, int | None]] = []
    for orphan in orphans:
        gone = None
        if free:
            size, actor = heapq.heappop(free)
            if size + 1 < slots:
                heapq.heappush(free, (size + 1, actor))
            rows[actor].append(orphan)
        else:
            actor, slot = _least_needed(rows, copies, spare, taken)
            gone = rows[actor][slot]
            copies[gone] -= 1
            rows[actor][slot] = orphan
        copies[orphan] += 1
        taken[actor] += 1
        seated.append((orphan, actor, gone))
    return seated


def _least_needed(
    rows: list[list[int]],
    copies: Counter[int],
    spare: list[list[tuple[int, int]]],
    taken: list[int],
) -> tuple[int, int]:
    """(actor, slot) of the spare copy that goes next; takes it from the heaps."""
    while True:
        actor = min((count, actor) for actor, count in enumerate(taken) if spare[actor])[1]
        key, slot = heapq.heappop(spare[actor])
        now = copies[rows[actor][slot]]
        if now == -key:
            return actor, slot
        if now > 1:
            heapq.heappush(spare[actor], (-now, slot))


def _check_room(experts: int, survivors: int, slots: int) -> None:
    without = experts - survivors * slots
    if without > 0:
        raise NoCapacity(
            f"{without} of {experts} experts per layer have no room: {survivors} expert actors "
            f"with {slots} slots each are left, {-(-experts // slots)} are needed"
        )


def _by_actor(actors: int) -> dict[int, dict[int, list[int]]]:
    return {actor: {} for actor in range(actors)}


def _frozen(lists: dict[int, dict[int, list[int]]]) -> dict[int, dict[int, tuple[int, ...]]]:
    return {
        actor: {layer: tuple(ids) for layer, ids in layers.items()}
        for actor, layers in lists.items()
        if layers
    }
