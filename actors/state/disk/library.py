"""All folders under one root: those that this process writes, and those of others.

`find` may be called by any thread; the rest by the one that writes.
"""

import itertools
import logging
from collections import deque
from pathlib import Path
from typing import NamedTuple

from expertmesh.actors.state.disk.errors import DiskFailed, named
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.folder import FolderView
from expertmesh.actors.state.disk.index import Index, Spot, folder_of, spot
from expertmesh.actors.state.disk.manifest import Entry, Op
from expertmesh.actors.state.disk.writer import Writer
from expertmesh.actors.state.item import Kind, Name

_log = logging.getLogger(__name__)

PREFIX = "writer-"
MOST_FOLDERS = 4096


class Found(NamedTuple):
    folder: Path
    entry: Entry


def folder_path(root: Path, number: int) -> Path:
    return root / f"{PREFIX}{number:08d}"


class Library:
    """writers: the first takes new records, others are folders of dead processes that were adopted
    to evict from them. dead: places not to be read any more, whatever an index says. failed:
    folders that could not be opened or read, each time."""

    def __init__(self, files: Files, root: Path, primary: Writer) -> None:
        self._files, self.root = files, root
        self.writers = [primary]
        self.views: dict[int, FolderView] = {}
        self.dead: set[Spot] = set()
        self.failed = 0
        self._lost: deque[tuple[Entry, bool]] = deque()
        self._ticks = itertools.count(1)
        self._order: tuple[Writer | FolderView, ...] = (primary,)

    @classmethod
    def open(cls, files: Files, root: Path) -> "Library":
        """Takes the first folder that nobody writes, or makes one. Raises DiskFailed."""
        with named(f"opening {root}"):
            files.make_folder(root)
            known = {path.name for path in files.folders(root)}
        failed = 0
        for number in range(1, MOST_FOLDERS):
            path = folder_path(root, number)
            try:
                with named(f"making {path}"):
                    files.make_folder(path)
                    files.sync_folder(root)
                primary = Writer.acquire(files, path, number)
            except DiskFailed:
                # A folder with a bad sector does not take the others along.
                if path.name not in known:
                    raise
                failed += 1
                continue
            if primary is not None:
                library = cls(files, root, primary)
                library.failed = failed
                try:
                    library.refresh()
                except DiskFailed:
                    primary.let_go()
                    raise
                return library
        raise DiskFailed(f"{root} has {MOST_FOLDERS} folders, all in use", "busy")

    @property
    def primary(self) -> Writer:
        return self.writers[0]

    @property
    def indexes(self) -> list[Index]:
        return [shelf.index for shelf in self._order]

    @property
    def living(self) -> set[int]:
        """All segments that anyone is known to have."""
        return {number for index in self.indexes for number in index.segments}

    def find(self, name: Name) -> Found | None:
        """Ours before others'; of sessions the newest."""
        best: Found | None = None
        for shelf in self._order:
            entry = shelf.index.entries.get(name)
            if entry is None or spot(entry.place) in self.dead:
                continue
            if name.kind is not Kind.SESSION:
                return Found(shelf.path, entry)
            if best is None or entry.stamp > best.entry.stamp:
                best = Found(shelf.path, entry)
        return best

    def ours(self, name: Name) -> Entry | None:
        """Where new records go, and not in an adopted folder."""
        entry = self.primary.index.entries.get(name)
        return None if entry is None or spot(entry.place) in self.dead else entry

    def touch(self, entry: Entry) -> None:
        """An item was written or read: its segment is the last to be evicted. Any thread."""
        for index in self.indexes:
            held = index.segments.get(entry.place.segment)
            if held is not None:
                held.used = next(self._ticks)

    def names(self, kind: Kind) -> dict[Name, Entry]:
        """Everything of a kind, with the entry that `find` would choose."""
        out: dict[Name, Entry] = {}
        for index in self.indexes:
            entries = index.sessions if kind is Kind.SESSION else index.entries
            for name, entry in entries.copy().items():
                if name.kind is kind and spot(entry.place) not in self.dead:
                    held = out.get(name)
                    if held is None or (kind is Kind.SESSION and entry.stamp > held.stamp):
                        out[name] = entry
        return out

    def quarantine(self, entry: Entry, lasting: bool) -> None:
        """A place that did not hold what it should. Any thread. lasting: also after a restart."""
        self.dead.add(spot(entry.place))
        self._lost.append((entry, lasting))

    def take_failures(self) -> int:
        """How many operations have failed, without loss of data, since the last call."""
        count, self.failed = self.failed, 0
        for writer in self.writers:
            count, writer.untidy = count + writer.untidy, 0
        return count

    def bury(self) -> None:
        """Writes down what readers have found damaged in our own folders."""
        while self._lost:
            entry, lasting = self._lost.popleft()
            for writer in self.writers:
                if lasting and writer.number == folder_of(entry.place.segment):
                    writer.remove(entry)

    def change(self, name: Name, op: Op) -> None:
        """REMOVE or UNPIN of all copies of an item, in whoever's folder."""
        for shelf in self._order:
            entry = shelf.index.entries.get(name)
            if entry is None:
                continue
            writer = shelf if isinstance(shelf, Writer) else self.primary
            writer.log(entry._replace(op=op))
            if op is Op.REMOVE:
                self.dead.add(spot(entry.place))

    def pin(self, name: Name) -> bool:
        """Whether one of our folders has it, which keeps it from now on."""
        for writer in self.writers:
            entry = writer.index.entries.get(name)
            if entry is not None and spot(entry.place) not in self.dead:
                if not entry.pinned:
                    writer.log(entry._replace(op=Op.PIN))
                return True
        return False

    @property
    def replicas(self) -> int:
        """Most processes that may be writing."""
        return 1 + len(self.views)

    def refresh(self) -> int:
        """Takes note of what others have written; returns how many damaged entries that showed."""
        with named(f"listing {self.root}"):
            folders = self._files.folders(self.root)
        mine = {writer.number for writer in self.writers}
        for view in [view for view in self.views.values() if view.path not in folders]:
            del self.views[view.number]
        damaged = 0
        for path in folders:
            tail = path.name.removeprefix(PREFIX)
            if path.name.startswith(PREFIX) and tail.isdigit() and int(tail) not in mine:
                view = self.views.setdefault(int(tail), FolderView(self._files, path, int(tail)))
                before = view.damaged
                try:
                    view.refresh()
                except DiskFailed:
                    self.failed += 1
                damaged += view.damaged - before
        self._reorder()
        self._heed()
        return damaged

    def tell_damage(self) -> None:
        """One line of what was found when it was opened, if anything was."""
        damaged = sum(shelf.damaged for shelf in self._order)
        torn = sum(writer.torn for writer in self.writers)
        missing = sum(writer.missing for writer in self.writers)
        if damaged or torn or missing or self.failed:
            _log.warning(
                "state in %s: %d damaged and %d unfinished entries, %d records missing, %d folders "
                "unreadable; what is lost is computed again",
                self.root, damaged, torn, missing, self.failed,
            )  # fmt: skip

    def adopt(self) -> None:
        """Makes folders ours whose writers are dead."""
        for number, view in list(self.views.items()):
            try:
                writer = Writer.acquire(self._files, view.path, number)
            except DiskFailed:
                self.failed += 1
                continue
            if writer is not None:
                self.writers.append(writer)
                del self.views[number]
        self._reorder()
        self._heed()

    def _reorder(self) -> None:
        self._order = (*self.writers, *self.views.values())

    def _heed(self) -> None:
        """What anyone has said of records in another's folder: obeyed here, forgotten when the
        segments are gone."""
        living = self.living
        for index in self.indexes:
            for entry in list(index.elsewhere.values()):
                if entry.op is Op.REMOVE:
                    self.dead.add(spot(entry.place))
                for writer in self.writers:
                    if writer.number == folder_of(entry.place.segment):
                        writer.obey(entry)
        # A copy, because readers add to it. What they add meanwhile they will find damaged again.
        self.dead = {place for place in self.dead.copy() if place[0] in living}
        for writer in self.writers:
            writer.prune_elsewhere(living)

    def close(self) -> None:
        failed: DiskFailed | None = None
        for writer in self.writers:
            try:
                writer.close()
            except DiskFailed as error:
                failed = error
        if failed is not None:
            raise failed
