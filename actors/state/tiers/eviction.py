"""Which item of a tier is worth least."""

from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count

from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.tiers.entry import Entry, State

# A cached answer is read again by a replay, a failover or its own session, seldom by others.
_REUSE = {"prefill": 1.0, "decode": 0.25}


class EvictionOrder:
    """Greedy-Dual-Size-Frequency: an item's value is how often it was seen lately times the tokens
    that it saves computing, per byte; the value of the last one evicted is added to those that come
    after, so that what is not used again gives way in the end (kv-state 3.2).

    Only what nothing in the tier depends on may go: a page after the pages and the snapshot that
    stand on it, so that a chain is eaten from its tip. Within that, pages and snapshots (with
    manifests) each have half of the bytes, and what one side does not use the other may.

    Not synchronised: the tier's lock is held around every call.
    """

    def __init__(self) -> None:
        self._entries: dict[Name, Entry] = {}
        self._dependants: Counter[Name] = Counter()
        self._heaps: dict[bool, list[tuple[float, int, Name]]] = {True: [], False: []}
        self._order = count()  # equal values: first come, first evicted
        self._age = 0.0
        self.bytes = Counter[Kind]()

    def add(self, entry: Entry, seen: int) -> None:
        """A new entry; it may be evicted once it is committed and `rate`d again."""
        self._entries[entry.name] = entry
        self.bytes[entry.header.kind] += entry.nbytes
        entry.below = self._snapshot_below(entry)
        self._lean(entry)
        self.rate(entry, seen)

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

    def rate(self, entry: Entry, seen: int) -> None:
        """Its value, now that it was seen so often."""
        worth = _REUSE[entry.header.lineage] * max(1, seen) * _tokens_saved(entry)
        entry.priority = self._age + worth / max(1, entry.nbytes)
        self.offer(entry)

    def offer(self, entry: Entry) -> None:
        """Puts it up for eviction if nothing forbids that; to be called when something no longer
        does (a pin or a holder gone, a commit)."""
        if not self._may_go(entry):
            return
        heap = self._heaps[entry.header.kind is Kind.PAGE]
        heappush(heap, (entry.priority, next(self._order), entry.name))
        if len(heap) > 64 + 4 * len(self._entries):
            heap[:] = [item for item in heap if self._current(item) is not None]
            heapify(heap)

    def pop(self) -> Entry | None:
        """The next to go, of the side that has more than its half. None: nothing may go."""
        pages = self.bytes[Kind.PAGE] * 2 > self.bytes.total()
        for side in (pages, not pages):
            heap = self._heaps[side]
            while heap:
                item = heappop(heap)
                entry = self._current(item)
                if entry is not None:
                    self._age = max(self._age, entry.priority)
                    return entry
        return None

    def _lean(self, entry: Entry) -> None:
        if entry.parent is not None:
            self._dependants[entry.parent] += 1

    def _let_go(self, entry: Entry) -> None:
        if (parent := entry.parent) is None:
            return
        self._dependants[parent] -= 1
        if not self._dependants[parent]:
            del self._dependants[parent]
            if (freed := self._entries.get(parent)) is not None:
                self.offer(freed)

    def _current(self, item: tuple[float, int, Name]) -> Entry | None:
        priority, _, name = item
        entry = self._entries.get(name)
        if entry is None or entry.priority != priority or not self._may_go(entry):
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

    def _snapshot_below(self, entry: Entry) -> int:
        """From the entry before it: exact when chains are added in their order, and else too
        low, which keeps the item a little longer."""
        header = entry.header
        parent = Name(header.key, Kind.PAGE) if header.kind is Kind.SNAPSHOT else entry.parent
        page = None if parent is None else self._entries.get(parent)
        if page is None:
            return 0
        if header.kind is Kind.PAGE and Name(page.header.key, Kind.SNAPSHOT) in self._entries:
            return page.header.position
        return page.below


def _tokens_saved(entry: Entry) -> int:
    """A snapshot saves what is computed from the one before it; a page its part of that; what a
    manifest saves is not known, and it is small."""
    if entry.header.kind is Kind.SNAPSHOT:
        return max(1, entry.header.position - entry.below)
    return max(1, len(entry.header.tokens))
