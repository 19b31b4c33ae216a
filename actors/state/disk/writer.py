"""Writing one folder: records first, then the manifest's word for them, then the index in RAM.

append -> [sync records -> append to manifest -> sync manifest -> publish] (kv-state 3.8 item 1).
What a failed sync has left on the device is unknown and cannot be asked again: its segment is
closed, its manifest's generation ends, and nothing of the group counts as stored.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from expertmesh.actors.state.disk.errors import DiskFailed, named
from expertmesh.actors.state.disk.files import Buffer, Files
from expertmesh.actors.state.disk.folder import (
    State,
    generations,
    index_path,
    load,
    manifest_path,
    segment_path,
    segments,
)
from expertmesh.actors.state.disk.index import Index, folder_of, spot
from expertmesh.actors.state.disk.manifest import (
    Checkpoint,
    Entry,
    Op,
    dropped,
    pack,
    pack_checkpoint,
)
from expertmesh.actors.state.disk.record import Place, aligned
from expertmesh.actors.state.item import Name

_log = logging.getLogger(__name__)

# A generation ends when its manifest is longer than this and than twice what lives.
MIN_ENTRIES = 4096


class Active:
    """The segment that takes records. size: bytes allocated; end: where the next one goes."""

    def __init__(self, fd: int, segment: int, size: int) -> None:
        self.fd, self.segment, self.size = fd, segment, size
        self.end = 0


class Writer:
    """Of a folder whose lock this process holds. Used by one thread; `index` is read by others.

    committed: what was put and is on disk, until the caller takes it out. damaged: manifest
    entries and checkpoints, torn: entries at the manifest's end, as a crash leaves them, missing:
    records that the manifest told of and that were not there; all found when the folder was opened.
    untidy: failures that cost no data.
    """

    def __init__(self, files: Files, path: Path, state: State, lock: int) -> None:
        self.path, self.number = path, state.index.number
        self.index: Index = state.index
        self.damaged, self.torn = state.damaged, state.torn
        self.missing = self.untidy = 0
        self.committed: list[Entry] = []
        self.active: Active | None = None
        self.pending: dict[Name, Entry] = {}
        self._files, self._lock = files, lock
        self._generation, self._sequence = state.generation, state.sequence
        self._next_segment = state.next_segment
        self._offset, self._entries = 0, 0
        self._manifest: int | None = None
        self._queue: list[Entry] = []
        self._unsynced: list[Active] = []
        self._doomed: set[int] = set()
        self._gone = False  # files were removed, and no commit has failed for it yet

    @classmethod
    def acquire(cls, files: Files, path: Path, number: int) -> "Writer | None":
        """None where another process writes the folder. Tidies it up and begins a generation."""
        with named(f"locking {path}"):
            lock = files.lock(path / "lock")
        if lock is None:
            return None
        try:
            writer = cls(files, path, load(files, path, number), lock)
            with named(f"opening {path}"):
                writer._reconcile()
            writer._begin_generation()
        except BaseException:
            files.close(lock)
            raise
        return writer

    def _reconcile(self) -> None:
        """Trusts no file: records must lie inside theirs, and files must have records."""
        names = self._files.names(self.path)
        present = set(segments(names))
        for number in list(self.index.segments):
            size = self._files.size(segment_path(self.path, number)) if number in present else 0
            held = self.index.segments[number]
            for name in list(held.names):
                entry = self.index.entries[name]
                if entry.place.offset + entry.place.nbytes > size:
                    self.index.forget_place(entry)
                    self.missing += 1
            if held.names and size > held.end:  # allocated and never written
                self._files.truncate(segment_path(self.path, number), held.end)
            elif not held.names:
                self.index.drop(number)
        for number in present - self.index.segments.keys():
            self._files.unlink(segment_path(self.path, number))
        for leftover in names:
            if leftover.endswith(".tmp"):
                self._files.unlink(self.path / leftover)

    def fits(self, nbytes: int) -> bool:
        return self.active is not None and self.active.end + aligned(nbytes) <= self.active.size

    def begin_segment(self, size: int) -> None:
        """A new active segment with `size` bytes allocated. Raises DiskFull or DiskFailed."""
        self.seal()
        number = (self.number << 32) | self._next_segment
        path = segment_path(self.path, number)
        self._next_segment += 1
        with named(f"allocating {path}"):
            fd = self._files.create(path)
            try:
                self._files.allocate(fd, size)
                self._files.sync_folder(self.path)
            except BaseException:
                self._files.close(fd)
                self._files.unlink(path)
                raise
        self.active = Active(fd, number, size)

    def seal(self) -> None:
        """The active segment takes no more records."""
        if self.active is not None:
            self._unsynced.append(self.active)
            self.active = None

    def next_place(self, nbytes: int) -> Place:
        assert self.active is not None
        return Place(self.active.segment, self.active.end, nbytes)

    def append(self, entry: Entry, buffers: Sequence[Buffer]) -> None:
        """Writes a record at next_place; it exists after the next commit. Raises DiskFailed."""
        assert self.active is not None
        with named(f"writing to {self.path}"):
            self._files.write(self.active.fd, buffers, entry.place.offset)
        self.active.end += aligned(entry.place.nbytes)
        self.pending[entry.name] = entry

    def log(self, entry: Entry) -> None:
        """Something other than a PUT, in RAM at once and on disk with the next commit."""
        self.index.apply(entry)
        self._queue.append(entry)

    def hold(self) -> None:
        """Makes the folder again where somebody has removed it, or its lock. The next commit fails
        all the same. Raises DiskFailed, "busy" where another process has it meanwhile."""
        self._notice()
        self._retake()

    def _retake(self) -> None:
        path = self.path / "lock"
        with named(f"locking {self.path}"):
            if self._files.still_named(self._lock, path):
                return
            self._files.make_folder(self.path)
            self._files.sync_folder(self.path.parent)
            # Whoever made a new one has put things here, and may be gone again.
            lock = None if path.name in self._files.names(self.path) else self._files.lock(path)
        if lock is None:
            raise DiskFailed(f"another process has taken {self.path}", "busy")
        self._files.close(self._lock)
        self._lock = lock

    def _notice(self) -> None:
        """What is written to files without a name is lost, however well it is synced: then a new
        generation and a new segment begin, and what was in removed segments is forgotten."""
        opened = [(self._lock, self.path / "lock")]
        if self._manifest is not None:
            opened.append((self._manifest, manifest_path(self.path, self._generation)))
        for active in self._written():
            opened.append((active.fd, segment_path(self.path, active.segment)))
        with named(f"looking into {self.path}"):
            if self._gone or all(self._files.still_named(*each) for each in opened):
                return
            try:
                names = self._files.names(self.path)
            except (FileNotFoundError, NotADirectoryError):
                names = []
            taken = "lock" in names and not self._files.still_named(*opened[0])
            present = set() if taken else set(segments(names))
            self._doomed &= present
        self._gone = True
        self.untidy += 1
        self._end_generation()
        self.seal()
        before = len(self.index.entries)
        for number in self.index.segments.keys() - present:
            self.index.drop(number)
        lost = before - len(self.index.entries)
        _log.error("files were removed from %s while in use: %d items are lost", self.path, lost)

    def _check(self) -> None:
        self._notice()
        if self._gone:
            self._gone = False
            self._retake()
            raise DiskFailed(f"files were removed from {self.path}")

    def commit(self) -> None:
        """Makes everything since the last one last. Raises DiskFailed: then what was appended is
        gone, and what was logged is tried again with the next. It is raised once, too, where files
        were removed since."""
        puts = list(self.pending.values())
        try:
            self._check()
            if not (puts or self._queue or self._unsynced or self._doomed):
                return
            if self._manifest is None:
                self._begin_generation()
            if puts:
                self._sync_segments()
            self._log_all(puts + self._queue)
            self._check()
        except DiskFailed:
            self.pending.clear()
            self.seal()
            self._tidy()
            raise
        self.pending.clear()
        self._queue.clear()
        for entry in puts:
            self.index.apply(entry)
        self.committed += puts
        self._tidy()
        if self._entries > max(MIN_ENTRIES, 2 * len(self.index.entries)):
            self._tried(self._begin_generation)

    def _tidy(self) -> None:
        """Gives back the blocks of sealed segments that no record uses."""
        if not self._queue:  # else a segment's end is not on disk yet
            while self._doomed:
                self._tried(self.unlink, self._doomed.pop())
        while self._unsynced:
            self._tried(self._close, self._unsynced.pop())

    def _tried(self, step: Callable[..., None], *arguments: object) -> None:
        try:
            step(*arguments)
        except DiskFailed:
            self.untidy += 1

    def _close(self, active: Active) -> None:
        held = self.index.segments.get(active.segment)
        path = segment_path(self.path, active.segment)
        with named(f"closing {path}"):
            ours = self._files.still_named(active.fd, path)
            self._files.close(active.fd)
            if not ours:
                return
            if held is None or not held.names:
                self.unlink(active.segment)
            elif held.end < active.size:
                self._files.truncate(path, held.end)

    def _sync_segments(self) -> None:
        with named(f"syncing segments of {self.path}"):
            for active in self._written():
                self._files.sync(active.fd)

    def _written(self) -> list[Active]:
        return [*self._unsynced, *([self.active] if self.active else [])]

    def _log_all(self, entries: list[Entry]) -> None:
        if not entries:
            return
        assert self._manifest is not None
        data = pack(entries, self._sequence)
        try:
            with named(f"writing the manifest of {self.path}"):
                self._files.write(self._manifest, [data], self._offset)
                self._files.sync(self._manifest)
        except DiskFailed:
            self._end_generation()
            raise
        self._sequence += len(entries)
        self._entries += len(entries)
        self._offset += len(data)

    def sealed_segments(self) -> list[int]:
        """Those that take no more records and have none that waits for a commit."""
        busy = {active.segment for active in self._written()}
        return [number for number in self.index.segments if number not in busy]

    def empty_segments(self) -> list[int]:
        """Sealed ones in which nothing lives any more."""
        held = self.index.segments
        return [number for number in self.sealed_segments() if not held[number].names]

    def drop(self, segment: int) -> None:
        """Evicts a sealed segment with all that is in it: first the word, then the file."""
        if not self.index.segments[segment].names:
            self.unlink(segment)
            return
        self.log(dropped(segment))
        self._doomed.add(segment)
        self.commit()

    def drop_unsaid(self, segment: int) -> None:
        """Evicts without a word before: whoever looks for it finds a file missing, and a restart
        counts its records as such. The word follows with the next commit."""
        self.log(dropped(segment))
        self.unlink(segment)

    def unlink(self, segment: int) -> None:
        self.index.drop(segment)
        with named(f"removing segment {segment:x}"):
            self._files.unlink(segment_path(self.path, segment))

    def remove(self, entry: Entry) -> None:
        """Of a record here or, as seen from here, in another's folder."""
        self.log(entry._replace(op=Op.REMOVE))

    def obey(self, entry: Entry) -> None:
        """REMOVE or UNPIN that another writer has noted about a record of this folder."""
        held = self.index.entries.get(entry.name)
        if held is None or spot(held.place) != spot(entry.place):
            return
        if entry.op is Op.REMOVE or held.pinned:
            self.log(entry)

    def _end_generation(self) -> None:
        if self._manifest is not None:
            self._files.close(self._manifest)
            self._manifest = None

    def _begin_generation(self) -> None:
        """Checkpoint, new manifest, then the generation before last is let go."""
        self._end_generation()
        self.hold()
        self._generation += 1
        target = index_path(self.path, self._generation)
        temporary = target.with_suffix(".tmp")
        data = pack_checkpoint(
            Checkpoint(
                self._generation,
                self._sequence,
                self._next_segment,
                list(self.index.checkpoint()),
            )
        )
        with named(f"writing {target}"):
            fd = self._files.create(temporary)
            try:
                self._files.write(fd, [data], 0)
                self._files.sync(fd)
            finally:
                self._files.close(fd)
            # Readers look for the index: what goes with it is there before.
            manifest = self._files.create(manifest_path(self.path, self._generation))
            try:
                self._files.rename(temporary, target)
                self._files.sync_folder(self.path)
            except BaseException:
                self._files.close(manifest)
                raise
        self._manifest, self._offset, self._entries = manifest, 0, 0
        self._tried(self._forget_generations, self._generation - 1)

    def _forget_generations(self, before: int) -> None:
        with named(f"tidying up {self.path}"):
            names = self._files.names(self.path)
            for kind, path in (("index", index_path), ("manifest", manifest_path)):
                for generation in generations(names, kind):
                    if generation < before:
                        self._files.unlink(path(self.path, generation))

    def prune_elsewhere(self, living: set[int]) -> None:
        """Forgets what it said of records in other folders whose segments are gone."""
        gone = [
            entry
            for entry in self.index.elsewhere.values()
            if entry.place.segment not in living and folder_of(entry.place.segment) != self.number
        ]
        for entry in gone:
            del self.index.elsewhere[spot(entry.place)]

    def close(self) -> None:
        """Commits and checkpoints, so that the next start is quick. Idempotent."""
        if self._lock < 0:
            return
        try:
            self.seal()
            self.commit()
            self._begin_generation()
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Leaves the folder to others as it is."""
        self._end_generation()
        self._files.close(self._lock)
        self._lock = -1
