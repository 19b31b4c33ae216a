"""The tiers below the device, as one store (kv-state 3.6)."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from expertmesh.actors.state.codec.packed import Packed
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Item, Kind, Name, StateLayout, Tier
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import StoreStats, TierStats
from expertmesh.actors.state.tiers.breaker import Clock
from expertmesh.actors.state.tiers.cold import ColdTier
from expertmesh.actors.state.tiers.entry import Entry, State
from expertmesh.actors.state.tiers.fetch import StoreFetch
from expertmesh.actors.state.tiers.host import HostTier
from expertmesh.actors.state.tiers.loads import Loads
from expertmesh.actors.state.tiers.packer import Packer
from expertmesh.actors.state.tiers.worker import Crew, Worker
from expertmesh.actors.state.tiers.writer import ColdWriter

_TICK_S = 0.02
_READERS = {"host-read": 2, "disk-read": 3}  # threads
# A step of one of the threads that takes longer hangs: by default the deadlines of all that it does
# are below this.
STUCK_S = 30.0
_TOUCHES, _MOST_TOUCHES = 64, 4096  # names noted at a time, and calls that may wait for that
# Items on their way to the disk pass through host memory; so much it has even where `host_bytes` is
# less, unless a measurement wants less.
TRANSIT_BYTES = 64 << 20


class TieredStore:
    """Host memory, and below it the disk. Implements `store.Store`.

    One lock, held for bookkeeping only: never while packing, hashing, or at the disk. Threads: one
    packs, some verify what host memory gives back, one ends what is late; with a disk one writes
    and some read.
    """

    def __init__(
        self,
        layout: StateLayout,
        settings: StateSettings,
        *,
        disk: DiskLog | None = None,
        wake: Callable[[], None] = lambda: None,
        clock: Clock = time.monotonic,
        transit_bytes: int | None = None,
    ) -> None:
        """disk: opened; the store closes it. wake: called, on any thread and without a lock, when
        a fetch has ended. transit_bytes: instead of TRANSIT_BYTES."""
        self._settings, self._log = settings, disk
        self._lock = threading.RLock()
        self._pins: set[Name] = set()
        capacity = settings.host_bytes
        if disk is not None:
            transit = TRANSIT_BYTES if transit_bytes is None else transit_bytes
            capacity = max(capacity, transit, 2 * layout.nbytes(Kind.SNAPSHOT))
        self._host = HostTier(capacity, self.on_disk)
        self._cold = None if disk is None else ColdTier(disk, layout, clock)
        self._loads = Loads(
            layout,
            self._host,
            self._cold,
            self._lock,
            clock,
            wake=wake,
            used=self._used,
            room=self._make_room,
        )
        self._writer = None if disk is None else self._new_writer(disk, clock)
        self._packer = Packer(self._host, settings, self._lock, self._packed)
        self._touched: deque[Sequence[Name]] = deque(maxlen=_MOST_TOUCHES)
        self._closed = threading.Event()
        self._crew = self._hire(clock)
        self._crew.start()

    @property
    def durable(self) -> bool:
        return self._log is not None

    def where(self, name: Name, exact: bool = True) -> Tier | None:
        entry = self._host.entries.get(name)
        if entry is not None and self._loads.serves(entry, exact):
            return "host"
        return "disk" if self.on_disk(name) else None

    def on_disk(self, name: Name) -> bool:
        return self._cold is not None and self._cold.has(name)

    def put(self, item: Item, *, durable: bool = False, pinned: bool = False) -> bool:
        name = item.header.name
        with self._lock:
            entry = self._host.entries.get(name)
            known = entry is not None and name.kind is not Kind.SESSION
            if not known and not self._packer.has_room(item):
                self._host.refused += 1
                return False
            if pinned:
                self._pins.add(name)
            if entry is not None and known:
                self._used(entry)
                self._mark(entry)
                return not durable or self._owe(entry)
            if entry is not None:
                self._host.remove(entry)
            self._host.seen.add(name)
            entry = self._packer.take(item)
            self._mark(entry)
            return not durable or self._owe(entry)

    def touch(self, names: Sequence[Name]) -> None:
        """Noted soon, in the background: a long prompt has thousands of pages."""
        self._touched.append(names)

    def fetch(self, names: Sequence[Name], timeout_s: float, exact: bool = True) -> StoreFetch:
        return self._loads.start(names, timeout_s, exact)

    def load_seconds(self, names: Sequence[Name]) -> float:
        with self._lock:
            return self._loads.seconds(names)

    def flush(self) -> StoreFetch:
        with self._lock:
            fetch = self._loads.begin_wait(self._settings.write_timeout_s)
            if self._writer is None:
                self._loads.settle(fetch, "")
            else:
                self._writer.flush(fetch)
            return fetch

    def keep(self, names: Sequence[Name], pinned: bool = False) -> list[Name]:
        lost = []
        with self._lock:
            if pinned:
                self._pins.update(names)
            for name in names:
                entry = self._host.entries.get(name)
                if entry is not None and entry.content.exact:
                    kept = self._owe(entry)
                    self._mark(entry)
                else:
                    kept = self._confirm(name)
                if not kept:
                    lost.append(name)
        return lost

    def position(self, name: Name) -> int:
        entry = self._host.entries.get(name)
        found = None if self._log is None else self._log.position(name)
        return max(-1 if entry is None else entry.header.position, -1 if found is None else found)

    def positions(self, kind: Kind) -> Mapping[Name, int]:
        with self._lock:
            entries = self._host.entries.values()
            held = {e.name: e.header.position for e in entries if e.header.kind is kind}
        found = {} if self._log is None else self._log.positions(kind)
        return found | {n: max(at, found.get(n, 0)) for n, at in held.items()}

    def pin(self, names: Sequence[Name]) -> None:
        self._change_pins(names, True)

    def unpin(self, names: Sequence[Name]) -> None:
        self._change_pins(names, False)

    def drop(self, names: Sequence[Name]) -> None:
        """What is pinned stays."""
        with self._lock:
            names = [name for name in names if name not in self._pins]
            for name in names:
                if (entry := self._host.entries.get(name)) is not None:
                    self._host.remove(entry)
            if self._writer is not None:
                self._writer.remove(names)

    def look(self) -> StoreFetch:
        with self._lock:
            fetch = self._loads.begin_wait(self._settings.read_timeout_s)
            if self._writer is None:
                self._loads.settle(fetch, "")
            else:
                self._writer.look(fetch)
            return fetch

    @property
    def in_use(self) -> tuple[int, int, int]:
        """Fetches under way, items held by fetches, bytes that reads may take: zero when nobody
        wants anything."""
        with self._lock:
            return self._loads.active, self._host.held, self._loads.reserved

    def stats(self) -> StoreStats:
        with self._lock:
            host = self._host.stats()
            host.queued = self._packer.queued + self._loads.queued("host")
        disk = TierStats() if self._log is None else self._log.stats()
        if self._cold is not None and self._writer is not None:
            with self._lock:
                self._cold.tell(disk)
                self._writer.tell(disk)
                disk.queued += self._loads.queued("disk")
        dead, stuck = self._crew.dead, self._crew.stuck(STUCK_S)
        return StoreStats(host=host, disk=disk, threads_dead=len(dead), threads_stuck=len(stuck))

    def close(self, timeout_s: float = 5.0) -> None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._packer.stop()
            self._loads.stop()
        self._crew.join(deadline, "pack")
        with self._lock:
            if self._writer is not None:
                self._writer.stop()
        self._closed.set()
        # A thread that hangs at the disk still uses the log: closing it would not help either.
        if self._crew.join(deadline) and self._log is not None:
            self._log.close()

    def _new_writer(self, disk: DiskLog, clock: Clock) -> ColdWriter:
        return ColdWriter(
            disk,
            self._host,
            self._lock,
            clock,
            queue=self._settings.queue,
            timeout_s=self._settings.write_timeout_s,
            bytes_per_s=self._settings.write_bytes_per_s,
            pinned=self._pins.__contains__,
            settled=self._settled,
            end=self._loads.settle,
            announce=self._loads.announce,
        )

    def _hire(self, clock: Clock) -> Crew:
        steps = [("pack", self._packer.step)]
        steps += _READERS["host-read"] * [("host-read", self._loads.read_host)]
        if self._writer is not None:
            steps.append(("disk-write", self._writer.step))
            steps += _READERS["disk-read"] * [("disk-read", self._loads.read_disk)]
        steps.append(("deadlines", self._tick))  # last: it looks after all others
        return Crew([Worker(name, step, clock) for name, step in steps])

    def _tick(self) -> bool:
        """One step of the thread that ends what is late and notices what is dead."""
        self._loads.tick()
        with self._lock:
            if self._writer is not None:
                self._writer.tick()
            self._make_room()
            dead = self._crew.dead
            for name in set(dead):
                if dead.count(name) == _READERS.get(name, 1):
                    self._lose(name)
        self._loads.announce()
        self._take_note()
        return not self._closed.wait(_TICK_S)

    def _take_note(self) -> None:
        """Of what was touched, some names at a time: the engine waits for the lock."""
        while self._touched:
            names = self._touched.popleft()
            for at in range(0, len(names), _TOUCHES):
                with self._lock:
                    for name in names[at : at + _TOUCHES]:
                        entry = self._host.entries.get(name)
                        if entry is not None:
                            self._used(entry)
                        else:
                            self._host.seen.add(name)

    def _lose(self, worker: str) -> None:
        """A tier whose threads are dead takes nothing any more; without readers it has nothing."""
        reason = f"the {worker} thread is dead"
        if worker in ("pack", "host-read"):
            self._packer.stop(reason)
        if worker == "disk-write" and self._writer is not None and not self._writer.down:
            self._writer.stop(reason)
        if worker == "disk-read" and self._cold is not None:
            self._cold.down = reason

    def _used(self, entry: Entry) -> None:
        """A second sight is what admits to the disk (TinyLFU)."""
        seen = self._host.touch(entry)
        if seen > 1 and entry.state is State.COMMITTED:
            self._offer(entry)

    def _offer(self, entry: Entry) -> None:
        if self._writer is None or self.on_disk(entry.name) or not entry.content.exact:
            return
        self._writer.offer(entry.name, entry.nbytes)

    def _owe(self, entry: Entry) -> bool:
        """Promises it to the disk. False: that cannot be, or there is none."""
        writer = self._writer
        if writer is None:
            return True
        if self.on_disk(entry.name) and entry.name.kind is not Kind.SESSION:
            return self._confirm(entry.name)
        if not writer.promise(entry.name):
            return False
        entry.durable = True
        if entry.state is not State.WRITING:
            if entry.state is State.EVICTING:
                self._host.stay(entry)
            writer.write(entry.name, entry.nbytes)
        return True

    def _confirm(self, name: Name) -> bool:
        """Whether what host memory has not got whole is on the disk, or about to be: then a flush
        waits until that is certain."""
        writer = self._writer
        if writer is None or not (self.on_disk(name) or writer.writes(name)):
            return False
        if self.on_disk(name) and name not in self._pins:
            return True
        kept = writer.pin([name], owed=True)
        if name not in self._pins:
            writer.unpin([name])
        return kept

    def _packed(self, entry: Entry, packed: Packed | None) -> None:
        """Owed and twice seen items go on to the disk; so does what only the disk keeps whole."""
        writer = self._writer
        if packed is None:
            if writer is not None:
                writer.settle(entry.name, "pack")
            return
        more = None if entry.content.exact else packed
        if writer is not None and entry.durable:
            writer.write(entry.name, packed.nbytes, more)
        elif writer is not None and more is not None:
            writer.offer(entry.name, packed.nbytes, more)
        elif self._host.seen.count(entry.name) > 1:
            self._offer(entry)
        self._make_room()

    def _settled(self, name: Name, reason: str) -> None:
        """An item's write has ended."""
        if not reason and self._cold is not None:
            self._cold.negative.forget(name)
        entry = self._host.entries.get(name)
        if entry is None or (self._writer is not None and self._writer.owes(name)):
            return
        entry.durable = False
        if entry.state is State.EVICTING:
            self._host.evict(entry)
        else:
            self._mark(entry)

    def _make_room(self) -> None:
        """Evicts, and hands on to the disk what is worth it."""
        writer = self._writer
        for name in self._host.reclaim(writer.room if writer is not None else 0):
            entry = self._host.entries[name]
            if writer is None or not writer.offer(name, entry.nbytes):
                self._host.evict(entry)

    def _mark(self, entry: Entry) -> None:
        """A pinned item stays in host memory as long as nothing below has it."""
        self._host.pin(entry, entry.name in self._pins and not self.on_disk(entry.name))

    def _change_pins(self, names: Sequence[Name], pinned: bool) -> None:
        with self._lock:
            (self._pins.update if pinned else self._pins.difference_update)(names)
            for name in names:
                if (entry := self._host.entries.get(name)) is not None:
                    self._mark(entry)
            if self._writer is not None and pinned:
                self._writer.pin([name for name in names if self.on_disk(name)])
            elif self._writer is not None:
                self._writer.unpin(names)
