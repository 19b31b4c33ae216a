"""Reading the cold tier: the segment log, and when to leave it alone."""

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from expertmesh.actors.state.codec.packed import BadPayload, Packed
from expertmesh.actors.state.disk.errors import DiskFailed
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.disk.record import Record
from expertmesh.actors.state.item import Header, Kind, Name, StateLayout
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.breaker import Breaker, Clock
from expertmesh.actors.state.tiers.content import Stored
from expertmesh.actors.state.tiers.negative import NegativeCache

# What says that the device is ill, and not that an item is missing.
ILL = frozenset({"timeout", "io", "error"})


class DiskRead(NamedTuple):
    """content: exact, as the disk has it. kept: what of it stays in host memory. verify_seconds: of
    hashing."""

    header: Header
    content: Stored
    kept: Stored
    verify_seconds: float


class ColdTier:
    """What can be had from the disk. `read_all` blocks and needs no lock, `has` and `newer` need
    none either, for the engine's thread asks; the rest only looks at memory and is called with the
    store's lock held."""

    def __init__(self, log: DiskLog, layout: StateLayout, clock: Clock) -> None:
        self.log, self._layout = log, layout
        self._parts = {kind: layout.parts(kind) for kind in Kind}
        self.breaker = Breaker(clock)
        self.negative = NegativeCache(clock)
        self.speed = Bandwidth(5e8, 1e-3)
        self.hits = self.misses = 0
        self.failures: Counter[str] = Counter()
        self.down = ""  # why nothing is read any more

    def has(self, name: Name) -> bool:
        """Whether it is worth asking for."""
        return not self.down and self.log.has(name) and name not in self.negative

    def newer(self, name: Name, position: int) -> bool:
        """Whether another replica has replaced what we know: only manifests have versions, and
        their position is it."""
        if name.kind is not Kind.SESSION:
            return False
        found = self.log.position(name)
        return found is not None and found > position

    def tell(self, stats: TierStats) -> None:
        """Adds what only we have counted."""
        stats.hits, stats.misses = self.hits, self.misses
        add_failures(stats, self.failures)
        stats.read_only = stats.read_only or self.down

    def allow(self) -> bool:
        return self.breaker.allow()

    def judge(self, reason: str) -> None:
        """How a fetch that was allowed has ended."""
        if reason in ILL:
            self.breaker.failed()
        elif reason in ("cancelled", "busy", "closed"):
            self.breaker.abandoned()
        else:
            if self.breaker.tripped:
                self.negative.next_generation()
            self.breaker.succeeded()

    def read_all(self, names: Sequence[Name]) -> list[DiskRead | str]:
        """Verified items, or why there is none: missing, corrupt, sealed, io, closed. Any
        thread."""
        start = time.perf_counter()
        try:
            records = self.log.read_all(names)
        except DiskFailed as error:
            return [error.reason] * len(names)
        outcomes = [self._open(name, record) for name, record in zip(names, records, strict=True)]
        seconds = (time.perf_counter() - start) / len(names)
        for outcome in outcomes:
            if isinstance(outcome, DiskRead):
                self.speed.measured(outcome.content.nbytes, seconds)
        return outcomes

    def _open(self, name: Name, record: Record | str) -> DiskRead | str:
        if isinstance(record, str):
            return record
        header = record.header
        if (header.key, header.kind) != name or header.layout != self._layout.fingerprint:
            return "corrupt"
        try:
            packed = Packed.parse(record.payload, self._parts[name.kind])
        except BadPayload:
            return "corrupt"
        whole, base = Stored(packed, record.body, record.digest), packed.base()
        kept = whole if base is packed else Stored(base)
        return DiskRead(header, whole, kept, record.verify_seconds)


def add_failures(stats: TierStats, more: Counter[str]) -> None:
    """Those that the log has counted itself are not counted twice."""
    for reason, times in more.items():
        stats.failures[reason] = max(times, stats.failures.get(reason, 0))
