"""Counts of the disk tier, added to by all its threads."""

import threading
from collections import Counter
from collections.abc import Iterable

from expertmesh.actors.state.disk.index import Index
from expertmesh.actors.state.item import Kind
from expertmesh.actors.state.stats import TierStats

# What was read and is not what was written.
CORRUPT = frozenset({"header", "version", "place", "key", "layout", "length", "payload", "short"})
CORRUPT |= {"manifest"}


def label(reason: str) -> str:
    """All damage is "corrupt" to operators. What another secret has sealed is not damaged."""
    return "corrupt" if reason in CORRUPT else reason


class Counters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures: Counter[str] = Counter()
        self._reads = self._read_bytes = self._writes = self._write_bytes = self._evictions = 0
        self._read_s = self._verify_s = self._write_s = 0.0
        self.read_only = ""

    def fail(self, reason: str, times: int = 1) -> None:
        with self._lock:
            self._failures[reason] += times

    def read(self, records: int, nbytes: int, read_s: float, verify_s: float) -> None:
        with self._lock:
            self._reads += records
            self._read_bytes += nbytes
            self._read_s += read_s
            self._verify_s += verify_s

    def wrote(self, records: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            self._writes += records
            self._write_bytes += nbytes
            self._write_s += seconds

    def evicted(self, items: int) -> None:
        with self._lock:
            self._evictions += items

    @property
    def damage(self) -> dict[str, int]:
        """What was found damaged, by the check that found it."""
        with self._lock:
            return {reason: n for reason, n in self._failures.items() if reason in CORRUPT and n}

    def stats(self, capacity: int, indexes: Iterable[Index]) -> TierStats:
        """failures: by label."""
        stats = TierStats(capacity_bytes=capacity, read_only=self.read_only)
        for index in indexes:
            for kind, tally in index.tallies.items():
                stats.items += tally.items
                stats.raw_bytes += tally.raw_bytes
                stats.pinned += tally.pinned
                stats.page_bytes += tally.nbytes if kind is Kind.PAGE else 0
                stats.snapshot_bytes += tally.nbytes if kind is Kind.SNAPSHOT else 0
                stats.other_bytes += tally.nbytes if kind is Kind.SESSION else 0
        with self._lock:
            stats.reads, stats.read_bytes = self._reads, self._read_bytes
            stats.read_seconds, stats.verify_seconds = self._read_s, self._verify_s
            stats.writes, stats.write_bytes = self._writes, self._write_bytes
            stats.write_seconds, stats.evictions = self._write_s, self._evictions
            for reason, times in self._failures.items():
                if times:
                    told = label(reason)
                    stats.failures[told] = stats.failures.get(told, 0) + times
        return stats
