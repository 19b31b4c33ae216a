"""Which item of a tier is worth least (kv-state 3.2)."""

from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.tiers.entry import Entry, State

# How much faster those age that are hardly asked for again. Measured on traces of coding agents
# (tests/support/state_traces): with 8 a small tier keeps too many of them, with 32 a large one too
# few; how often an item was used, or how many tokens it saves, as a weight finds less at any size.
UNLIKELY = 16


class _Candidate(NamedTuple):
    last: int
    order: int
    name: Name


class EvictionOrder:
    """Items of one kind have one size, and a chain is computed as a whole: what remains of value is
    the chance of being used again, taken as falling with the time since the last use.

    Only what nothing in the tier depends on may go: a page after the pages and the snapshot that
    stand on it, so that a chain is eaten from its tip. Between turns of a conversation only its
    newest snapshot is asked for, so one that has another above it ages faster, unless it was used
    twice and is where conversations part. So do answers, which replays read and others cannot.

    Pages and snapshots (with manifests) each have half of the bytes, and what one side does not use
    the other may. Not synchronised: the tier's lock is held around every call.
    """

    def __init__(self) -> None:
        self._entries: dict[Name, Entry] = {}
        self._dependants: Counter[Name] = Counter()
        self._above: Counter[Name] = Counter()  # snapshots that are the next one of a snapshot
        # By side (pages or not) and whether use is unlikely: last use first.
        self._heaps: dict[tuple[bool, bool], list[_Candidate]] = {
            (side, unlikely): [] for side in (True, False) for unlikely in (True, False)
        }
        self._now = {True: 0, False: 0}  # uses of each side
        self._order = count()  # equal values: first come, first evicted
        self.bytes = Counter[Kind]()

    def add(self, entry: Entry) -> None:
        """A new entry; it may be evicted once it is committed and offered again."""
        self._entries[entry.name] = entry
        self.bytes[entry.header.kind] += entry.nbytes
        entry.below = self._snapshot_below(entry)
        entry.last = self._tick(entry)
        self._lean(entry)

    def remove(self, entry: Entry) -> None:
        del self._entries[entry.name]
        self.bytes[entry.header.kind] -= entry.nbytes
        if entry.state is not State.EVICTING:
            self._let_go(entry)

    def start_leaving(self, entry: Entry) -> None:
        """It stays until it is copied; what is before it need not wait for that."""
        entry.state = State.EVICTING
        self._let_go(entry)

    def stay(self, entry: Entry) -> None:
        """Somebody wants what was about to leave."""
        entry.state = State.COMMITTED
        self._lean(entry)
        self.offer(entry)

    def resize(self, entry: Entry, nbytes: int) -> None:
        self.bytes[entry.header.kind] += nbytes - entry.nbytes
        entry.nbytes = nbytes

    def used(self, entry: Entry) -> None:
        entry.last, entry.uses = self._tick(entry), entry.uses + 1
        self.offer(entry)

    def offer(self, entry: Entry) -> None:
        """Puts it up for eviction if nothing forbids that; to be called when something no longer
        does (a pin or a holder gone, a commit)."""
        if not self._may_go(entry):
            return
        heap = self._heaps[_is_page(entry), self._unlikely(entry)]
        heappush(heap, _Candidate(entry.last, next(self._order), entry.name))
        if len(heap) > 64 + 4 * len(self._entries):
            heap[:] = [one for one in heap if self._current(one) is not None]
            heapify(heap)

    def pop(self) -> Entry | None:
        """The next to go, of the side that has more than its half. None: nothing may go."""
        pages = self.bytes[Kind.PAGE] * 2 > self.bytes.total()
        return self._pop_side(pages) or self._pop_side(not pages)

    def _pop_side(self, side: bool) -> Entry | None:
        likely, unlikely = self._first(side, False), self._first(side, True)
        if likely is None or unlikely is None:
            entry = likely or unlikely
        else:
            now = self._now[side] + 1
            older = (now - unlikely.last) * UNLIKELY >= now - likely.last
            entry = unlikely if older else likely
        if entry is not None:
            heappop(self._heaps[side, entry is unlikely])
        return entry

    def _first(self, side: bool, unlikely: bool) -> Entry | None:
        """The first of a heap that still may go as what it was offered."""
        heap = self._heaps[side, unlikely]
        while heap:
            entry = self._current(heap[0])
            if entry is not None and self._unlikely(entry) == unlikely:
                return entry
            heappop(heap)
        return None

    def _current(self, candidate: _Candidate) -> Entry | None:
        entry = self._entries.get(candidate.name)
        if entry is None or entry.last != candidate.last or not self._may_go(entry):
            return None
        return entry

    def _may_go(self, entry: Entry) -> bool:
        return (
            entry.state is State.COMMITTED
            and not entry.holders
            and not entry.pinned
            and not entry.durable
            and entry.name not in self._dependants
        )

    def _unlikely(self, entry: Entry) -> bool:
        if entry.header.lineage == "decode":
            return True
        above = self._above.get(entry.name, 0)
        return bool(above) and entry.uses < (2 if above == 1 else 1)

    def _lean(self, entry: Entry) -> None:
        if entry.parent is not None:
            self._dependants[entry.parent] += 1
        if entry.header.kind is Kind.SNAPSHOT and entry.below is not None:
            self._above[entry.below] += 1
            self._offer_again(entry.below)

    def _let_go(self, entry: Entry) -> None:
        if (parent := entry.parent) is not None:
            self._subtract(self._dependants, parent)
            if parent not in self._dependants:
                self._offer_again(parent)
        if entry.header.kind is Kind.SNAPSHOT and entry.below is not None:
            self._subtract(self._above, entry.below)
            self._offer_again(entry.below)

    def _offer_again(self, name: Name) -> None:
        if (entry := self._entries.get(name)) is not None:
            self.offer(entry)

    @staticmethod
    def _subtract(counts: Counter[Name], name: Name) -> None:
        counts[name] -= 1
        if not counts[name]:
            del counts[name]

    def _tick(self, entry: Entry) -> int:
        self._now[_is_page(entry)] += 1
        return self._now[_is_page(entry)]

    def _snapshot_below(self, entry: Entry) -> Name | None:
        """The snapshot before this item on its chain, as far as the chain was added in order."""
        header = entry.header
        page = self._entries.get(entry.parent) if entry.parent is not None else None
        if page is None:
            return None
        here = Name(page.header.key, Kind.SNAPSHOT)
        return here if header.kind is Kind.PAGE and here in self._entries else page.below


def _is_page(entry: Entry) -> bool:
    return entry.header.kind is Kind.PAGE
