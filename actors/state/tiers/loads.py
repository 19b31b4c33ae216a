"""Loads from both tiers: shared, in turn, each with a deadline."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from expertmesh.actors.state.item import Name, StateLayout, Tier
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.breaker import Clock
from expertmesh.actors.state.tiers.cold import ColdTier, DiskRead
from expertmesh.actors.state.tiers.entry import Entry
from expertmesh.actors.state.tiers.fetch import LoadedItem, Loading, StoreFetch
from expertmesh.actors.state.tiers.host import HostTier
from expertmesh.actors.state.tiers.turns import Turns

_IDLE_S = 1.0  # the longest that a reader sleeps without looking
_STAGING = 64 << 20  # bytes that reads from the disk may take where the host tier is smaller
_BATCH, _BATCH_BYTES = 32, 8 << 20  # host items verified between two looks at whose turn it is


class Loads:
    """Fetches under way. All public methods take the store's lock.

    used: told, under the lock, of every entry that a fetch has delivered. room: told, under the
    lock, that the host tier has grown.
    """

    def __init__(
        self,
        layout: StateLayout,
        host: HostTier,
        cold: ColdTier | None,
        lock: threading.RLock,
        clock: Clock,
        *,
        wake: Callable[[], None],
        used: Callable[[Entry], None],
        room: Callable[[], None],
    ) -> None:
        self._layout, self._host, self._cold = layout, host, cold
        self._lock, self._clock = lock, clock
        self._wake, self._used, self._room = wake, used, room
        self._work = threading.Condition(lock)
        self._turns = {"host": Turns(), "disk": Turns()}
        self._disk_loads: dict[Name, Loading] = {}
        self._active: set[StoreFetch] = set()
        self._forgotten: deque[tuple[list[Entry], int]] = deque()
        self._reserved = 0
        self._closing = False
        self.host_speed = Bandwidth(5e9, 2e-5)

    def start(self, names: Sequence[Name], timeout_s: float, exact: bool) -> StoreFetch:
        """Claims what host memory has, queues the rest for the disk. Never waits."""
        deadline = self._clock() + timeout_s
        fetch = StoreFetch(
            names, exact, deadline, self._clock, self.settle, self._note_forgotten, len(names)
        )
        fetch.loaded = [None] * len(names)
        with self._lock:
            self._drop_forgotten()
            reason = "closed" if self._closing else self._claim(fetch)
            if reason or not names:
                self._end(fetch, reason)
            else:
                self._active.add(fetch)
                self._work.notify_all()
        return fetch

    def settle(self, fetch: StoreFetch, reason: str) -> None:
        """Ends a fetch that is late or unwanted; lets go what an unwanted one holds."""
        with self._lock:
            if not fetch.ended:
                if reason == "timeout":
                    self._blame(fetch)
                self._end(fetch, reason)
            elif reason == "cancelled":
                self._release(fetch, reason)

    def tick(self) -> bool:
        """Ends what is late; whether anything was."""
        with self._lock:
            self._drop_forgotten()
            now = self._clock()
            late = [fetch for fetch in self._active if now >= fetch.deadline]
            for fetch in late:
                self.settle(fetch, "timeout")
        return bool(late)

    @property
    def active(self) -> int:
        return len(self._active)

    def queued(self, tier: str) -> int:
        return len(self._turns[tier])

    def stop(self) -> None:
        """Ends all fetches and, with their next look, the readers."""
        with self._lock:
            self._closing = True
            for fetch in list(self._active):
                self._end(fetch, "cancelled")
            self._work.notify_all()

    def read_host(self) -> bool:
        """One step of the host reader: verifies some items. False: it is to end."""
        batch = self._next_host()
        if batch is None:
            return False
        for load in batch:
            entry = load.entry
            assert entry is not None
            start = time.perf_counter()
            fine = entry.content.verified(max(0.0, self._patience(load)))
            self._host_read(load, entry, fine, time.perf_counter() - start)
        if batch:
            self._wake()
        return True

    def read_disk(self) -> bool:
        """One step of a disk reader. False: it is to end."""
        cold = self._cold
        assert cold is not None
        with self._lock:
            if self._closing:
                return False
            load = self._turns["disk"].take()
            if load is None:
                self._work.wait(_IDLE_S)
                return True
        try:
            outcome = cold.read(load.name)
        except BaseException:
            self._disk_read(load, "error")
            raise
        self._disk_read(load, outcome)
        self._wake()
        return True

    def _claim(self, fetch: StoreFetch) -> str:
        """Loads for every name, queued; or why there is no point in trying."""
        host_loads, disk_loads = [], []
        for at, name in enumerate(fetch.names):
            entry = self._host.entries.get(name)
            if entry is not None and (entry.content.exact or not fetch.exact):
                self._hold(fetch, entry)
                host_loads.append(Loading(name, [(fetch, at)], entry))
                continue
            load = self._disk_loads.get(name)
            if load is None:
                if self._cold is None or not self._cold.has(name):
                    return "missing"
                load = self._disk_loads[name] = Loading(name, [])
            load.waiters.append((fetch, at))
            disk_loads.append(load)
        fetch.loading = [*host_loads, *disk_loads]
        if disk_loads and (reason := self._admit(fetch, disk_loads)):
            return reason
        self._turns["host"].add(fetch, host_loads)
        self._turns["disk"].add(fetch, disk_loads)
        return ""

    def _admit(self, fetch: StoreFetch, loads: Sequence[Loading]) -> str:
        """Whether the disk may be asked, and what it gives has room. One fetch alone always has."""
        assert self._cold is not None
        if not self._cold.reads.allow():
            return "busy"
        fetch.probing = True
        fetch.reserved = sum(self._layout.nbytes(load.name.kind) for load in loads)
        self._reserved += fetch.reserved
        if fetch.reserved < self._reserved > max(self._host.capacity, _STAGING):
            return "busy"
        return ""

    def _next_host(self) -> list[Loading] | None:
        with self._lock:
            if self._closing:
                return None
            batch: list[Loading] = []
            size = 0
            while len(batch) < _BATCH and size < _BATCH_BYTES:
                load = self._turns["host"].take()
                if load is None:
                    break
                batch.append(load)
                size += load.entry.nbytes if load.entry is not None else 0
            if not batch:
                self._work.wait(_IDLE_S)
            return batch

    def _host_read(self, load: Loading, entry: Entry, fine: bool, seconds: float) -> None:
        with self._lock:
            stats = self._host.stats
            stats.reads += 1
            stats.read_bytes += entry.nbytes
            stats.read_seconds += seconds
            stats.verify_seconds += seconds
            self.host_speed.measured(entry.nbytes, seconds)
            if not fine:
                self._host.remove(entry)
                self._fail(load, "corrupt")
                return
            self._deliver(load, LoadedItem(entry.header, entry.content, "host"), entry, seconds)

    def _disk_read(self, load: Loading, outcome: DiskRead | str) -> None:
        """Delivers, and keeps what was read in host memory for the next one who wants it."""
        with self._lock:
            if self._disk_loads.get(load.name) is load:
                del self._disk_loads[load.name]
            if isinstance(outcome, str):
                self._fail(load, outcome)
                return
            entry = self._host.entries.get(load.name)
            if entry is None and outcome.kept.nbytes <= self._host.capacity:
                entry = self._host.add(outcome.item.header, outcome.kept)
                self._host.commit(entry, outcome.kept)
            for fetch, _ in load.waiters:
                if entry is not None:
                    self._hold(fetch, entry)
            self._deliver(load, outcome.item, entry, outcome.seconds)
            self._room()

    def _deliver(
        self, load: Loading, item: LoadedItem, entry: Entry | None, verify_seconds: float
    ) -> None:
        waiters, load.waiters = load.waiters, []
        for fetch, at in waiters:
            fetch.loaded[at] = item
            fetch.left -= 1
            fetch.nbytes += item.nbytes
            fetch.verify_seconds += verify_seconds
            if not fetch.left:
                self._end(fetch, "")
        if waiters and entry is not None:
            self._used(entry)
        self._stats(item.tier).hits += len(waiters)

    def _fail(self, load: Loading, reason: str) -> None:
        waiters, load.waiters = load.waiters, []
        for fetch, _ in waiters:
            self._end(fetch, reason)
        failures = self._stats("disk" if load.entry is None else "host").failures
        failures[reason] = failures.get(reason, 0) + 1

    def _blame(self, fetch: StoreFetch) -> None:
        """Whatever a late fetch still waits for is what made it late."""
        for load in fetch.loading:
            if not any(waiter is fetch for waiter, _ in load.waiters):
                continue
            failures = self._stats("disk" if load.entry is None else "host").failures
            failures["timeout"] = failures.get("timeout", 0) + 1
            if self._cold is not None and load.entry is None and load.started:
                self._cold.negative.add(load.name)
                if self._disk_loads.get(load.name) is load:
                    del self._disk_loads[load.name]  # the next one who wants it reads anew

    def _end(self, fetch: StoreFetch, reason: str) -> None:
        self._active.discard(fetch)
        for load in fetch.loading:
            load.waiters = [waiter for waiter in load.waiters if waiter[0] is not fetch]
            if not load.waiters and not load.started and self._disk_loads.get(load.name) is load:
                del self._disk_loads[load.name]
        fetch.loading = []
        if fetch.probing and self._cold is not None:
            self._cold.judge(reason)
            fetch.probing = False
        fetch.finish(reason)
        if reason:
            self._release(fetch, reason)

    def _release(self, fetch: StoreFetch, reason: str) -> None:
        self._drop(fetch.held, fetch.reserved)
        fetch.held, fetch.reserved, fetch.loaded, fetch.reason = [], 0, [], reason

    def _hold(self, fetch: StoreFetch, entry: Entry) -> None:
        self._host.hold(entry)
        fetch.held.append(entry)

    def _note_forgotten(self, held: list[Entry], reserved: int) -> None:
        self._forgotten.append((held, reserved))

    def _drop_forgotten(self) -> None:
        while self._forgotten:
            self._drop(*self._forgotten.popleft())

    def _drop(self, held: list[Entry], reserved: int) -> None:
        for entry in held:
            self._host.release(entry)
        self._reserved -= reserved

    def _stats(self, tier: Tier) -> TierStats:
        if tier == "disk" and self._cold is not None:
            return self._cold.stats
        return self._host.stats

    def _patience(self, load: Loading) -> float:
        with self._lock:
            deadlines = [fetch.deadline for fetch, _ in load.waiters]
        return max(deadlines, default=0.0) - self._clock()
