"""Whose turn is next: priority classes, and fair shares between flows within a class.

A flow is whoever pays: an API key, or all who have none. Within a class it is start-time fair
queueing (Goyal, Vin, Cheng 1996): each flow has a start tag, the flow of the smallest is served,
and its tag moves on by the cost of what it got. Two flows that both wait get equal cost, to within
the largest single cost of each, however many requests either has. Nobody saves up: a flow that
comes back begins at the tag being served.

Classes: smaller numbers first, as in vLLM. Each turn that goes to another class is counted, and
after PATIENCE of them a waiting class has its turn: so it gets one in any PATIENCE + (waiting
classes) turns, whatever else arrives. Ageing by class and not by request, as one flow's old
requests must not outrank another's new ones of the same priority.

Decides only; knows no clock and no task.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from expertmesh.actors.attention.scheduler import AGED_LEVELS

Item = TypeVar("Item")

PATIENCE = 32
# Priorities beyond +-8 are served as 8, as in the engine: so there are at most 17 classes.
LEVELS = AGED_LEVELS


@dataclass(eq=False, frozen=True, slots=True)
class Place(Generic[Item]):
    """Where an item waits. number: counts arrivals."""

    item: Item
    flow: str
    level: int
    cost: float
    number: int


@dataclass(slots=True)
class _Flow(Generic[Item]):
    """start: the tag of its first place. Places in the order they came."""

    start: float
    places: OrderedDict[int, Place[Item]] = field(default_factory=OrderedDict)

    def rank(self) -> tuple[float, int]:
        return self.start, next(iter(self.places))


class _Class(Generic[Item]):
    """Start-time fair queueing of one priority. `passed`: turns of others since its last one."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow[Item]] = {}
        self.passed = 0
        self._now = 0.0  # the start tag of what was served last
        self._ends: dict[str, float] = {}  # of flows that do not wait, where ahead of `_now`

    def push(self, place: Place[Item]) -> None:
        flow = self.flows.get(place.flow)
        if flow is None:
            start = max(self._now, self._ends.pop(place.flow, 0.0))
            flow = self.flows[place.flow] = _Flow(start)
        flow.places[place.number] = place

    def pop(self) -> Place[Item]:
        name, flow = min(self.flows.items(), key=lambda entry: entry[1].rank())
        _, place = flow.places.popitem(last=False)
        self._now = flow.start
        flow.start += place.cost
        self._drop_if_empty(name, flow)
        return place

    def remove(self, place: Place[Item]) -> bool:
        flow = self.flows.get(place.flow)
        if flow is None or flow.places.pop(place.number, None) is None:
            return False
        self._drop_if_empty(place.flow, flow)
        return True

    def _drop_if_empty(self, name: str, flow: _Flow[Item]) -> None:
        if flow.places:
            return
        del self.flows[name]
        if self.flows:
            self._ends[name] = flow.start
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        else:  # nobody waits: the next to come begin as equals
            self._now = 0.0
            self._ends.clear()


class FairQueue(Generic[Item]):
    """See the module. Costs are positive."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[Item]] = {}
        self._waiting = Counter[str]()  # places of each flow
        self._arrivals = 0

    def __len__(self) -> int:
        return self._waiting.total()

    def __iter__(self) -> Iterator[Place[Item]]:
        for group in self._classes.values():
            for flow in group.flows.values():
                yield from flow.places.values()

    def push(self, item: Item, flow: str, priority: int, cost: float) -> Place[Item]:
        assert cost > 0
        level = _level(priority)
        self._arrivals += 1
        place = Place(item, flow, level, cost, self._arrivals)
        self._classes.setdefault(level, _Class()).push(place)
        self._waiting[flow] += 1
        return place

    def pop(self) -> Place[Item]:
        """The next in turn. The queue must not be empty."""
        level = self._turn()
        for other, group in self._classes.items():
            group.passed = 0 if other == level else group.passed + 1
        place = self._classes[level].pop()
        self._left(place)
        return place

    def _turn(self) -> int:
        """The class that waited PATIENCE turns, the longest first; else the most urgent."""
        due = [(-g.passed, level) for level, g in self._classes.items() if g.passed >= PATIENCE]
        return min(due)[1] if due else min(self._classes)

    def remove(self, place: Place[Item]) -> bool:
        """Takes a place out of the queue, at no cost for its flow. False: it does not wait."""
        group = self._classes.get(place.level)
        if group is None or not group.remove(place):
            return False
        self._left(place)
        return True

    def _left(self, place: Place[Item]) -> None:
        self._waiting[place.flow] -= 1
        if not self._waiting[place.flow]:
            del self._waiting[place.flow]
        if not self._classes[place.level].flows:
            del self._classes[place.level]

    def who_gives_way(self, flow: str, priority: int) -> Place[Item] | None:
        """Whose place in a full queue an arrival may take; None when it has to go itself.

        The newest and least urgent of the flow that waits with most, if that is longer than the
        arrival's own; else one of its own that is less urgent. So no flow can fill the queue.
        """
        if not self._waiting:
            return None
        own = self._waiting[flow]
        longest, count = max(self._waiting.items(), key=lambda entry: entry[1])
        if count > own + 1:
            return self._last(longest)
        last = self._last(flow) if own else None
        return last if last is not None and last.level > _level(priority) else None

    def _last(self, flow: str) -> Place[Item]:
        level = max(level for level, group in self._classes.items() if flow in group.flows)
        places = self._classes[level].flows[flow].places
        return places[next(reversed(places))]


def _level(priority: int) -> int:
    return max(-LEVELS, min(LEVELS, priority))
