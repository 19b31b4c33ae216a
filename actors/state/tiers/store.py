"""The tiers below the device, as one store (kv-state 3.6)."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from expertmesh.actors.state.item import Item, Kind, Name, StateLayout, Tier
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import StoreStats, TierStats
from expertmesh.actors.state.tiers.breaker import Clock
from expertmesh.actors.state.tiers.cold import ColdTier
from expertmesh.actors.state.tiers.content import Unpacked, arrived, store_packed
from expertmesh.actors.state.tiers.entry import Entry
from expertmesh.actors.state.tiers.fetch import StoreFetch
from expertmesh.actors.state.tiers.host import HostTier
from expertmesh.actors.state.tiers.loads import Loads
from expertmesh.actors.state.tiers.worker import Worker

_TICK_S = 0.05
_IDLE_S = 1.0


class TieredStore:
    """Host memory, and below it the disk. Implements `store.Store`.

    One lock, held for bookkeeping only: never while packing, hashing, or at the disk. Threads: one
    packs, one verifies what host memory gives back, one ends what is late; with a disk one writes
    and some read.
    """

    def __init__(
        self,
        layout: StateLayout,
        settings: StateSettings,
        *,
        disk: ColdTier | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._host = HostTier(settings.host_bytes)
        self._cold = disk
        self._wake = wake
        self._loads = Loads(
            layout, self._host, disk, self._lock, clock, wake=wake, used=self._used, room=self._room
        )
        self._incoming: deque[tuple[Entry, Item]] = deque()
        self._most_incoming = max(settings.host_bytes // 4, 8 << 20)
        self._closing = threading.Event()
        self._workers = [
            Worker("pack", self._pack_next),
            Worker("host-read", self._loads.read_host),
            Worker("deadlines", self._tick),
        ]

    @property
    def durable(self) -> bool:
        return self._cold is not None

    def where(self, name: Name, exact: bool = True) -> Tier | None:
        entry = self._host.entries.get(name)
        if entry is not None and (entry.content.exact or not exact):
            return "host"
        if self._cold is not None and self._cold.has(name):
            return "disk"
        return None

    def put(self, item: Item, *, durable: bool = False, pinned: bool = False) -> bool:
        name = item.header.name
        with self._lock:
            entry = self._host.entries.get(name)
            if entry is not None and name.kind is Kind.SESSION:
                self._host.remove(entry)
                entry = None
            if entry is not None:
                self._host.touch(entry)
                return True
            if (
                len(self._incoming) >= self._settings.queue
                or self._host.writing_bytes + item.nbytes > self._most_incoming
                or item.nbytes > self._host.capacity
                or self._closing.is_set()
            ):
                self._host.stats.refused += 1
                return False
            self._host.seen.add(name)
            entry = self._host.add(item.header, Unpacked(item))
            entry.pinned = pinned
            self._incoming.append((entry, item))
            self._arrived.notify()
        return True

    def fetch(self, names: Sequence[Name], timeout_s: float, exact: bool = True) -> StoreFetch:
        return self._loads.start(names, timeout_s, exact)

    def load_seconds(self, names: Sequence[Name]) -> float:
        with self._lock:
            entries = [self._host.entries.get(name) for name in names]
            nbytes = sum(entry.nbytes for entry in entries if entry is not None)
            return self._loads.host_speed.seconds(nbytes, len(names))

    def touch(self, names: Sequence[Name]) -> None:
        with self._lock:
            for name in names:
                if (entry := self._host.entries.get(name)) is not None:
                    self._host.touch(entry)

    def keep(self, names: Sequence[Name], pinned: bool = False) -> list[Name]:
        return [name for name in names if self.where(name) is None]

    def pin(self, names: Sequence[Name]) -> None:
        self._mark(names, True)

    def unpin(self, names: Sequence[Name]) -> None:
        self._mark(names, False)

    def drop(self, names: Sequence[Name]) -> None:
        with self._lock:
            for name in names:
                if (entry := self._host.entries.get(name)) is not None:
                    self._host.remove(entry)

    def positions(self, kind: Kind) -> Mapping[Name, int]:
        with self._lock:
            entries = self._host.entries.values()
            return {e.name: e.header.position for e in entries if e.header.kind is kind}

    def flush(self) -> StoreFetch:
        return self._loads.start([], 0.0, True)

    def look(self) -> None: ...

    def stats(self) -> StoreStats:
        with self._lock:
            host = _copied(self._host.snapshot())
            host.queued = len(self._incoming) + self._loads.queued("host")
            disk = TierStats() if self._cold is None else _copied(self._cold.stats)
        dead = sum(worker.dead for worker in self._workers)
        return StoreStats(host=host, disk=disk, threads_dead=dead)

    def close(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._loads.stop()
        with self._lock:
            self._arrived.notify_all()
        for worker in self._workers:
            worker.join(deadline - time.monotonic())

    def _pack_next(self) -> bool:
        """One step of the packer."""
        with self._lock:
            if self._closing.is_set():
                return False
            if not self._incoming:
                self._arrived.wait(_IDLE_S)
                return True
            entry, item = self._incoming.popleft()
        try:
            if not arrived(item, self._settings.write_timeout_s):
                raise TimeoutError("the device has not written it")
            _, content = store_packed(item, self._settings.codec)
        except BaseException:
            with self._lock:
                self._host.stats.failures["pack"] = self._host.stats.failures.get("pack", 0) + 1
                self._host.remove(entry)
            raise
        with self._lock:
            if self._host.entries.get(entry.name) is entry:
                self._host.commit(entry, content)
                self._room()
        return True

    def _tick(self) -> bool:
        """One step of the thread that ends what is late."""
        if self._loads.tick():
            self._wake()
        return not self._closing.wait(_TICK_S)

    def _used(self, entry: Entry) -> None:
        self._host.touch(entry)

    def _room(self) -> None:
        self._host.reclaim(0)

    def _mark(self, names: Sequence[Name], pinned: bool) -> None:
        with self._lock:
            for name in names:
                if (entry := self._host.entries.get(name)) is not None:
                    entry.pinned = pinned
                    self._host.order.offer(entry)


def _copied(stats: TierStats) -> TierStats:
    return msgspec.structs.replace(stats, failures=dict(stats.failures))
