"""The warm tier: packed items in host memory under a byte budget."""

from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from expertmesh.actors.state.item import Header, Kind, Name
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.tiers.content import Content
from expertmesh.actors.state.tiers.entry import Entry, State
from expertmesh.actors.state.tiers.eviction import EvictionOrder
from expertmesh.actors.state.tiers.frequency import FrequencySketch

HIGH, LOW = 85, 70  # per cent of the capacity: where eviction starts, and where it ends

BITE = 128  # items that one reclaim looks at


class HostTier:
    """Entries by name. Only bookkeeping: threads, packing and disk belong to the store.

    Not synchronised: the store's lock is held around every call.
    """

    def __init__(self, capacity: int, below: Callable[[Name], bool] = lambda name: False) -> None:
        """below: whether the tier below has a name already."""
        self.capacity, self._below = capacity, below
        self.entries: dict[Name, Entry] = {}
        self.hits = self.misses = self.refused = 0
        self.failures: Counter[str] = Counter()
        self.read_only = ""
        self._counts = TierStats(capacity_bytes=capacity)
        self.seen = FrequencySketch()
        self.order = EvictionOrder()
        self.writing_bytes = 0  # taken over and not packed yet
        self._leaving_bytes = 0
        self._raw_bytes = 0
        self._in_use: dict[Name, Entry] = {}  # held or pinned
        self._reclaiming = False

    @property
    def used(self) -> int:
        """Bytes of what is committed."""
        return self.order.bytes.total() - self.writing_bytes

    def add(self, header: Header, content: Content) -> Entry:
        """A new entry, being written. Its name must not be here."""
        if header.name in self.entries:
            raise ValueError(f"{header.name} is in the host tier already")
        entry = Entry(header, content, content.nbytes)
        self.entries[header.name] = entry
        self.writing_bytes += entry.nbytes
        self._raw_bytes += content.raw_bytes
        self.order.add(entry)
        return entry

    def commit(self, entry: Entry, content: Content) -> None:
        """Its bytes are final: packed, or as a lower tier has given them."""
        self.writing_bytes -= entry.nbytes
        self.order.resize(entry, content.nbytes)
        entry.content = content
        entry.state = State.COMMITTED
        self._counts.writes += 1
        self._counts.write_bytes += content.nbytes
        self.order.offer(entry)

    def remove(self, entry: Entry) -> None:
        """It is no longer found; who holds it may read on."""
        if self.entries.get(entry.name) is not entry:
            return
        del self.entries[entry.name]
        if entry.state is State.WRITING:
            self.writing_bytes -= entry.nbytes
        elif entry.state is State.EVICTING:
            self._leaving_bytes -= entry.nbytes
        self._raw_bytes -= entry.content.raw_bytes
        self._in_use.pop(entry.name, None)
        self.order.remove(entry)

    def touch(self, entry: Entry) -> int:
        """Somebody has used it; returns how often it was seen lately."""
        self.order.used(entry)
        return self.seen.add(entry.name)

    def hold(self, entry: Entry) -> None:
        """Until released it is not evicted. What was about to leave stays."""
        self.stay(entry)
        entry.holders += 1
        self._note_use(entry)

    def stay(self, entry: Entry) -> None:
        """Somebody wants what may have been about to leave."""
        if entry.state is State.EVICTING:
            self._leaving_bytes -= entry.nbytes
            self.order.stay(entry)

    def release(self, entry: Entry) -> None:
        if entry.holders < 1:
            raise ValueError(f"{entry.name} is released more often than held")
        entry.holders -= 1
        self._note_use(entry)

    def pin(self, entry: Entry, pinned: bool) -> None:
        """A pinned entry is not evicted."""
        entry.pinned = pinned
        self._note_use(entry)

    @property
    def held(self) -> int:
        """References to what is here."""
        return sum(entry.holders for entry in self._in_use.values())

    def reclaim(self, copies: int) -> list[Name]:
        """From the high watermark down to the low one, some items at a time, for the engine waits
        for the lock: the least valuable are dropped, those worth a copy below (at most `copies`)
        are marked as leaving and returned. Above the capacity nothing waits for a copy (a disk that
        is slow must not stop the host tier)."""
        copy: list[Name] = []
        self._reclaiming = self._reclaiming or self.used * 100 > HIGH * self.capacity
        for _ in range(BITE if self._reclaiming else 0):
            if (self.used - self._leaving_bytes) * 100 <= LOW * self.capacity:
                self._reclaiming = False
                break
            entry = self.order.pop()
            if entry is None:
                break
            if len(copy) < copies and self.used <= self.capacity and self._worth_copying(entry):
                self.order.start_leaving(entry)
                self._leaving_bytes += entry.nbytes
                copy.append(entry.name)
            else:
                self.evict(entry)
        for entry in self._leaving():
            if self.used <= self.capacity:
                break
            self.evict(entry)
        return [name for name in copy if name in self.entries]

    def evict(self, entry: Entry) -> None:
        self._counts.evictions += 1
        self.remove(entry)

    def note_read(self, entry: Entry, seconds: float) -> None:
        """An entry's hash was checked; nothing else is read here."""
        self._counts.reads += 1
        self._counts.read_bytes += entry.nbytes
        self._counts.read_seconds += seconds
        self._counts.verify_seconds += seconds

    def stats(self) -> TierStats:
        """Counters and sizes of now."""
        sizes = self.order.bytes
        return msgspec.structs.replace(
            self._counts,
            page_bytes=sizes[Kind.PAGE],
            snapshot_bytes=sizes[Kind.SNAPSHOT],
            other_bytes=sizes[Kind.SESSION],
            raw_bytes=self._raw_bytes,
            items=len(self.entries),
            pinned=len(self._in_use),
            hits=self.hits,
            misses=self.misses,
            refused=self.refused,
            failures=dict(self.failures),
            read_only=self.read_only,
        )

    def _note_use(self, entry: Entry) -> None:
        if self.entries.get(entry.name) is not entry:
            return
        if entry.holders or entry.pinned:
            self._in_use[entry.name] = entry
        else:
            self._in_use.pop(entry.name, None)
            self.order.offer(entry)

    def _worth_copying(self, entry: Entry) -> bool:
        """TinyLFU: what was seen once is not worth a write (kv-state 3.6)."""
        return self.seen.count(entry.name) > 1 and not self._below(entry.name)

    def _leaving(self) -> Iterator[Entry]:
        if self._leaving_bytes and self.used > self.capacity:
            yield from [e for e in self.entries.values() if e.state is State.EVICTING]
