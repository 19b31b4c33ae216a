"""The cold tier: a log of pages, snapshots and sessions that outlives the process.

ROOT/writer-0000000N/ belongs to one process at a time, by a lock that dies with it; a process that
starts takes the first folder that nobody holds and continues it. All read all. Whatever is not
exactly what was appended is a miss with a counter (kv-state 3.7, 3.8).
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from expertmesh.actors.state.disk.counters import Counters
from expertmesh.actors.state.disk.errors import DiskFailed, DiskFull
from expertmesh.actors.state.disk.files import Buffer, Files
from expertmesh.actors.state.disk.index import Spot, spot
from expertmesh.actors.state.disk.library import Found, Library
from expertmesh.actors.state.disk.manifest import Entry, Op
from expertmesh.actors.state.disk.reader import Allocate, Reader
from expertmesh.actors.state.disk.record import Place, Record, encode, record_bytes
from expertmesh.actors.state.disk.seal import Seal
from expertmesh.actors.state.disk.space import Space, Victim, segment_size, victim
from expertmesh.actors.state.item import Header, Kind, Name
from expertmesh.actors.state.stats import TierStats

_log = logging.getLogger(__name__)

# After the file system was full, below the cap, and one eviction did not help: nothing is tried
# for so long. Whoever else fills the disk then costs us a segment per pause and not all at once.
FULL_PAUSE_S = 30.0
# From here on a session's position is the time of its change, in nanoseconds since 1970.
CLOCK_NS = 10**18
NOWHERE = Place(0, 0, 0)


class DiskLog:
    """append, sync, remove, pin, unpin, refresh and close: one thread. The rest: any."""

    def __init__(
        self,
        library: Library,
        space: Space,
        reader: Reader,
        counters: Counters,
        seal: Seal | None,
        clock: Callable[[], float],
    ) -> None:
        self._library, self._space, self._reader = library, space, reader
        self._counters, self._seal, self._clock = counters, seal, clock
        self._writer = library.primary
        self._copies: set[Spot] = set()
        self._full_until = 0.0
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        capacity: int,
        layout: bytes,
        segment_bytes: int = 0,
        secret: bytes | None = None,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "DiskLog":
        """capacity: most bytes that all replicas together allocate under `folder`. layout: of the
        items, those of others are misses. segment_bytes: 0 for 256 MiB or a 16th of the capacity.
        secret: seals what is written and refuses what is not sealed by it.

        Raises ValueError for impossible sizes, DiskFailed for a folder that cannot be used.
        """
        files = files or Files()
        size = segment_size(capacity, segment_bytes)
        library = Library.open(files, folder)
        counters = Counters()
        for writer in library.writers:
            counters.fail("manifest", writer.damaged)
            counters.fail("torn", writer.torn)
            counters.fail("missing", writer.missing)
        library.tell_damage()
        seal = Seal(secret) if secret else None
        log = cls(
            library,
            Space(files, folder, capacity, size),
            Reader(files, library, layout, seal, counters),
            counters,
            seal,
            clock,
        )
        log._space.measure()
        return log

    # -- writing ---------------------------------------------------------------------------------

    def append(
        self,
        header: Header,
        codec: str,
        raw_bytes: int,
        payload: Sequence[Buffer],
        *,
        pinned: bool = False,
    ) -> bool:
        """Whether the item waits for the next sync; False: it is there already. What has a page's
        or snapshot's name has its bytes, so only a session replaces the one before.

        pinned: never evicted until unpinned, like what replaces it. Raises DiskFull or DiskFailed:
        it is not stored then, and only what sync returns later of the others.
        """
        self._check_open()
        if header.kind is not Kind.SESSION and self._have(header.name, pinned):
            return False
        if self._clock() < self._full_until:
            raise DiskFull(f"no room was left a moment ago, under {self._library.root}")
        entry = self._entry(header, raw_bytes, pinned)
        for last in (False, True):
            try:
                self._write(header, codec, payload, entry, spare=False)
                break
            except DiskFull as error:
                beyond_us = isinstance(error.__cause__, OSError)
                # One segment and one more try: if others fill the disk, all would not be enough.
                if beyond_us and not last and self._evict():
                    continue
                self._full_until = self._clock() + FULL_PAUSE_S if beyond_us else 0.0
                self._counters.read_only = "full"
                self._counters.fail("full")
                raise
        self._full_until, self._counters.read_only = 0.0, ""
        return True

    def _have(self, name: Name, pinned: bool) -> bool:
        waiting = self._writer.pending.get(name)
        if waiting is not None:
            self._writer.pending[name] = waiting._replace(pinned=waiting.pinned or pinned)
            return True
        return self.has(name) and not (pinned and self.pin([name]))

    def _entry(self, header: Header, raw_bytes: int, pinned: bool) -> Entry:
        """Of a new item, without its place. It keeps the pin of what it replaces, and is newer.

        A session that says when it was changed is as new as that, however late it is written: a
        change that another replica made later, such as its end, must not be undone by it.
        """
        name, stamp = header.name, time.time_ns()
        found, waiting = self._library.find(name), self._writer.pending.get(name)
        for before in (found.entry if found else None, waiting):
            if before is not None:
                stamp, pinned = max(stamp, before.stamp + 1), pinned or before.pinned
        if header.kind is Kind.SESSION and header.position >= CLOCK_NS:
            stamp = header.position
        return Entry(Op.PUT, name, NOWHERE, raw_bytes, header.position, stamp, pinned)

    def _write(
        self, header: Header, codec: str, payload: Sequence[Buffer], entry: Entry, spare: bool
    ) -> None:
        began = time.perf_counter()
        nbytes = record_bytes(header, payload, self._seal)
        self._make_room(nbytes, spare)
        place = self._writer.next_place(nbytes)
        buffers = encode(header, codec, entry.raw_bytes, payload, place, self._seal)
        self._writer.append(entry._replace(place=place), buffers)
        self._counters.wrote(1, nbytes, time.perf_counter() - began)

    def _make_room(self, nbytes: int, spare: bool) -> None:
        """A segment in which the next record fits, under the cap. Raises DiskFull."""
        if nbytes > self._space.capacity - 2 * self._space.segment:
            raise DiskFull(f"a record of {nbytes} bytes, {self._space.capacity} are the cap")
        if not self._writer.fits(nbytes):
            self._writer.hold()
        while not self._writer.fits(nbytes):
            if self._space.begin_segment(self._writer, nbytes, spare):
                return
            if spare or not self._evict():
                raise DiskFull(f"{self._space.capacity} bytes are in use, none can be evicted")

    def _evict(self) -> bool:
        """Gives one segment back, its pinned records copied on before. False: there is none."""
        self._library.adopt()
        try:
            found = victim(self._library.writers)
            if found is None:  # what was appended since the last sync may fill all segments
                self._writer.commit()
                found = victim(self._library.writers)
            if found is None:
                return False
            held = found.writer.index.segments[found.segment]
            items = len(held.names)
            for name in sorted(held.names):
                if found.writer.index.entries[name].pinned and self._copy(found, name):
                    items -= 1
            self._writer.commit()
            found.writer.drop(found.segment)
        except DiskFull:
            return self._relieve()
        self._counters.evicted(items)
        self._reader.handles.keep(self._library.living)
        return True

    def _relieve(self) -> bool:
        """Gives a segment back when there is not even room for a manifest entry that says so."""
        found = victim(self._library.writers, copying=False)
        if found is None:
            return False
        self._counters.evicted(len(found.writer.index.segments[found.segment].names))
        found.writer.drop_unsaid(found.segment)
        self._reader.handles.keep(self._library.living)
        return True

    def _copy(self, found: Victim, name: Name) -> bool:
        """Whether a pinned record outlives its segment. It stays as old as it is: of a session,
        another replica may have a newer version."""
        entry = found.writer.index.entries[name]
        waiting = self._writer.pending.get(name)
        ours = waiting or self._library.ours(name)
        if ours is not None and ours != entry and ours.stamp >= entry.stamp:
            if waiting is not None:
                self._writer.pending[name] = waiting._replace(pinned=True)
            elif not ours.pinned:
                self._writer.log(ours._replace(op=Op.PIN))
            return True
        record = self._reader.verify(Found(found.writer.path, entry))
        if record is None:
            return False
        self._write(record.header, record.codec, [record.payload], entry, spare=True)
        self._copies.add(spot(self._writer.pending[name].place))
        return True

    def sync(self) -> list[Name]:
        """Makes all of it last and returns the names put since the last good sync, in order.

        Raises DiskFailed: what was appended since is not stored; removals are tried again.
        """
        self._check_open()
        began = time.perf_counter()
        self._library.bury()
        try:
            for writer in self._library.writers:
                writer.commit()
        except DiskFull:
            self._relieve()
            raise
        done, self._writer.committed = self._writer.committed, []
        for entry in done:
            self._library.touch(entry)
        names = [entry.name for entry in done if spot(entry.place) not in self._copies]
        self._copies.clear()
        self._counters.fail("io", self._library.take_failures())
        self._counters.wrote(0, 0, time.perf_counter() - began)
        return list(dict.fromkeys(names))

    def remove(self, names: Sequence[Name]) -> None:
        """Wherever copies are. They are gone for readers at once, for good with the next sync."""
        self._check_open()
        for name in names:
            self._writer.pending.pop(name, None)
            self._library.change(name, Op.REMOVE)

    def unpin(self, names: Sequence[Name]) -> None:
        self._check_open()
        for name in names:
            waiting = self._writer.pending.get(name)
            if waiting is not None:
                self._writer.pending[name] = waiting._replace(pinned=False)
            self._library.change(name, Op.UNPIN)

    def pin(self, names: Sequence[Name]) -> list[Name]:
        """Keeps them from eviction; returns those that no folder of ours has, which must be
        appended as pinned."""
        self._check_open()
        return [name for name in names if not self._library.pin(name)]

    def refresh(self) -> None:
        """Takes note of what other replicas have written and removed, and gives a segment back
        where they have no room and we more than a share. Raises DiskFailed."""
        self._check_open()
        self._writer.hold()
        self._counters.fail("manifest", self._library.refresh())
        self._counters.fail("io", self._library.take_failures())
        self._reader.handles.keep(self._library.living)
        if not self._library.views:
            return
        if self._space.crowded(self._library.writers, self._library.replicas):
            self._library.adopt()
            if self._space.crowded(self._library.writers, self._library.replicas):
                self._evict()

    def close(self) -> None:
        """Syncs and writes checkpoints. Idempotent. Where that fails it is told, and closed all the
        same: only what a sync has returned was promised."""
        if not self._closed:
            self._closed = True
            try:
                self._library.bury()
                self._library.close()
            except DiskFailed as error:
                _log.warning("state in %s: closed without a sync: %s", self._library.root, error)
            finally:
                self._reader.handles.close()

    # -- reading ---------------------------------------------------------------------------------

    def read(self, name: Name, allocate: Allocate | None = None) -> Record | None:
        """A verified item; None for a miss. allocate: makes the buffer for the body, of the size
        given or more; the record's payload is a view of it. Raises DiskFailed."""
        self._check_open()
        return self._reader.read(name, allocate)

    def read_all(self, names: Sequence[Name]) -> list[Record | str]:
        """Of each a verified item, or the label of why there is none. Those that were appended one
        after the other are read together. Raises DiskFailed when closed."""
        self._check_open()
        return self._reader.read_all(names)

    def why(self, name: Name) -> str:
        """Why a read gave nothing: "corrupt" or "sealed" where that was found, else "missing"."""
        return self._reader.spoiled.get(name, "missing")

    def has(self, name: Name) -> bool:
        """Whether it was there when last heard of. No I/O."""
        return self._library.find(name) is not None

    def nbytes(self, name: Name) -> int | None:
        """What a read of it reads."""
        found = self._library.find(name)
        return found.entry.place.nbytes if found else None

    def position(self, name: Name) -> int | None:
        """Of the one that a read would give. No I/O."""
        found = self._library.find(name)
        return found.entry.position if found else None

    def positions(self, kind: Kind) -> dict[Name, int]:
        """Position of everything of a kind. O(items)."""
        return {name: entry.position for name, entry in self._library.names(kind).items()}

    def names(self, kind: Kind) -> list[Name]:
        return list(self._library.names(kind))

    @property
    def damage(self) -> dict[str, int]:
        """What was found damaged, by the check that found it."""
        return self._counters.damage

    def stats(self) -> TierStats:
        """Of all folders; reads and writes are this process's."""
        return self._counters.stats(self._space.capacity, self._library.indexes)

    def _check_open(self) -> None:
        if self._closed:
            raise DiskFailed("the log is closed", "closed")
