"""Loads from both tiers: shared, in turn, each with a deadline."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from expertmesh.actors.state.item import Name, StateLayout, Tier
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.breaker import Clock
from expertmesh.actors.state.tiers.cold import ILL, ColdTier, DiskRead
from expertmesh.actors.state.tiers.content import Content
from expertmesh.actors.state.tiers.entry import Entry
from expertmesh.actors.state.tiers.fetch import LoadedItem, Loading, StoreFetch
from expertmesh.actors.state.tiers.host import HostTier
from expertmesh.actors.state.tiers.turns import Turns

log = logging.getLogger(__name__)

_IDLE_S = 1.0  # the longest that a reader sleeps without looking
STAGING_BYTES = 64 << 20  # bytes that reads from the disk may take where the host tier is smaller
# Items read between two looks at whose turn it is, and bytes after which it is looked again: some
# hundred microseconds in memory, and a millisecond of a good disk.
_MOST = 64
_ENOUGH = {"host": 8 << 20, "disk": 2 << 20}


Place = HostTier | ColdTier


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
        self._closing = self._ended = False
        self.host_speed = Bandwidth(5e9, 2e-5)
        self.unpack_speed = Bandwidth(1e9, 2e-5)

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

    def announce(self) -> None:
        """Wakes the engine if a fetch has ended since. Without the lock: it may take its own."""
        if self._ended:
            self._ended = False
            self._wake()

    def tick(self) -> None:
        """Ends what is late."""
        with self._lock:
            self._drop_forgotten()
            now = self._clock()
            late = [fetch for fetch in self._active if now >= fetch.deadline]
            for fetch in late:
                self.settle(fetch, "timeout")

    def serves(self, entry: Entry, exact: bool) -> bool:
        """Whether host memory has what is wanted: not only an estimate of it, and no manifest that
        another replica has replaced."""
        if exact and not entry.content.exact:
            return False
        return self._cold is None or not self._cold.newer(entry.name, entry.header.position)

    def begin_wait(self, timeout_s: float) -> StoreFetch:
        """Something to wait for that no load ends, only `settle` does."""
        deadline = self._clock() + timeout_s
        fetch = StoreFetch((), True, deadline, self._clock, self.settle, self._note_forgotten)
        self._active.add(fetch)
        return fetch

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def reserved(self) -> int:
        """Bytes that reads from the disk, under way or not let go yet, may take."""
        return self._reserved

    def queued(self, tier: str) -> int:
        return len(self._turns[tier])

    def seconds(self, names: Sequence[Name]) -> float:
        """What a fetch begun now would take, after what has begun; infinite if it must fail."""
        host = disk = host_reads = disk_reads = raw = 0
        for name in names:
            raw += self._layout.nbytes(name.kind)
            entry = self._host.entries.get(name)
            if entry is not None:
                host, host_reads = host + entry.nbytes, host_reads + 1
                continue
            nbytes = self._cold.log.nbytes(name) if self._cold and self._cold.has(name) else None
            if nbytes is None or (self._cold and self._cold.breaker.open):
                return math.inf
            disk, disk_reads = disk + nbytes, disk_reads + 1
        total = self.unpack_speed.seconds(raw, len(names)) if names else 0.0
        if host_reads:
            total += self.host_speed.seconds(host, host_reads)
        if disk_reads and self._cold is not None:
            total += self._cold.speed.seconds(disk + self._queued_bytes(), disk_reads)
        return total

    def stop(self) -> None:
        """Ends all fetches and, with their next look, the readers."""
        with self._lock:
            self._closing = True
            for fetch in list(self._active):
                self._end(fetch, "cancelled")
            self._work.notify_all()

    def read_host(self) -> bool:
        """One step of the host reader: verifies some items. False: it is to end."""
        loads = self._next("host")
        if not loads:
            return loads is not None
        checked = [(load, *self._check(load)) for load in loads]
        with self._lock:
            for load, content, fine, seconds in checked:
                self._host_read(load, content, fine, seconds)
        self.announce()
        return True

    def read_disk(self) -> bool:
        """One step of a disk reader. False: it is to end."""
        assert self._cold is not None
        loads = self._next("disk")
        if not loads:
            return loads is not None
        outcomes: Sequence[DiskRead | str] = ["error"] * len(loads)
        try:
            outcomes = self._cold.read_all([load.name for load in loads])
        finally:
            with self._lock:
                for load, outcome in zip(loads, outcomes, strict=True):
                    self._disk_read(load, outcome)
                self._room()
        self.announce()
        return True

    def _next(self, tier: str) -> list[Loading] | None:
        """What to read; nothing after a while in which there was nothing. None: no more ever."""
        with self._lock:
            if self._closing:
                return None
            loads = self._turns[tier].take(_MOST, _ENOUGH[tier])
            if not loads:
                self._work.wait(_IDLE_S)
            return loads

    def _check(self, load: Loading) -> tuple[Content, bool, float]:
        """What host memory has, whether that is intact, and seconds spent on it."""
        assert load.entry is not None
        content, start = load.entry.content, time.perf_counter()
        try:
            fine = content.verified(0.0 if content.packed else max(0.0, self._patience(load)))
        except Exception:
            log.exception("state: %s cannot be verified", load.name)
            fine = False
        return content, fine, time.perf_counter() - start

    def _queued_bytes(self) -> int:
        return sum(self._layout.nbytes(name.kind) for name in self._disk_loads)

    def _claim(self, fetch: StoreFetch) -> str:
        """Loads for every name, queued; or why there is no point in trying."""
        host_loads, disk_loads = [], []
        for at, name in enumerate(fetch.names):
            entry = self._host.entries.get(name)
            if entry is not None and self.serves(entry, fetch.exact):
                self._hold(fetch, entry)
                host_loads.append(Loading(name, [(fetch, at)], entry.nbytes, entry))
                fetch.loading.append(host_loads[-1])
                continue
            load = self._disk_loads.get(name)
            if load is None:
                if self._cold is None or not self._cold.has(name):
                    return "missing" if self._cold is None else self._cold.log.why(name)
                load = Loading(name, [], self._layout.nbytes(name.kind))
                self._disk_loads[name] = load
            load.waiters.append((fetch, at))
            disk_loads.append(load)
            fetch.loading.append(load)  # at once: what ends early must let go of it, too
        if disk_loads and (reason := self._admit(fetch, disk_loads)):
            return reason
        self._turns["host"].add(fetch, host_loads)
        self._turns["disk"].add(fetch, disk_loads)
        return ""

    def _admit(self, fetch: StoreFetch, loads: Sequence[Loading]) -> str:
        """Whether the disk may be asked, and what it gives has room. One fetch alone always has."""
        assert self._cold is not None
        if not self._cold.allow():
            return "busy"
        fetch.probing = True
        fetch.reserved = sum(self._layout.nbytes(load.name.kind) for load in loads)
        self._reserved += fetch.reserved
        if fetch.reserved < self._reserved > max(self._host.capacity, STAGING_BYTES):
            return "busy"
        return ""

    def _host_read(self, load: Loading, content: Content, fine: bool, seconds: float) -> None:
        entry = load.entry
        assert entry is not None
        self._host.note_read(entry, seconds)
        self.host_speed.measured(entry.nbytes, seconds)
        if fine:
            item = LoadedItem(entry.header, content, "host", self.unpack_speed)
            self._deliver(load, item, entry, seconds)
        elif content.packed is None:
            self._fail(load, "timeout")  # the device has not written it; the packer will see
        else:
            self._host.remove(entry)
            self._fail(load, "corrupt")

    def _disk_read(self, load: Loading, outcome: DiskRead | str) -> None:
        """Delivers, and keeps what was read in host memory for the next one who wants it."""
        if self._disk_loads.get(load.name) is load:
            del self._disk_loads[load.name]
        if isinstance(outcome, str):
            self._fail(load, outcome)
            return
        header = outcome.header
        entry = self._host.entries.get(load.name)
        if entry is not None and entry.header.position < header.position:
            self._host.remove(entry)  # a manifest that another replica has replaced
            entry = None
        if entry is None and outcome.kept.nbytes <= self._host.capacity:
            entry = self._host.add(header, outcome.kept)
            self._host.commit(entry, outcome.kept)
        for fetch, _ in load.waiters:
            if entry is not None:
                self._hold(fetch, entry)
        item = LoadedItem(header, outcome.content, "disk", self.unpack_speed)
        self._deliver(load, item, entry, outcome.verify_seconds)

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
        self._place(item.tier).hits += len(waiters)

    def _fail(self, load: Loading, reason: str) -> None:
        waiters, load.waiters = load.waiters, []
        for fetch, _ in waiters:
            self._end(fetch, reason)
        place = self._place("disk" if load.entry is None else "host")
        place.failures[reason] += 1
        place.misses += len(waiters)
        if load.entry is None and self._cold is not None and reason in ILL:
            self._cold.negative.add(load.name)

    def _blame(self, fetch: StoreFetch) -> None:
        """Whatever a late fetch still waits for is what made it late."""
        for load in fetch.loading:
            if not any(waiter is fetch for waiter, _ in load.waiters):
                continue
            place = self._place("disk" if load.entry is None else "host")
            place.failures["timeout"] += 1
            place.misses += 1
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
        self._ended = True
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

    def _place(self, tier: Tier) -> Place:
        if tier == "disk" and self._cold is not None:
            return self._cold
        return self._host

    def _patience(self, load: Loading) -> float:
        with self._lock:
            deadlines = [fetch.deadline for fetch, _ in load.waiters]
        return max(deadlines, default=0.0) - self._clock()
