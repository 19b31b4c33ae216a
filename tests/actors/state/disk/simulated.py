"""A disk in memory that forgets what was not synced: the model of a power failure.

Of data written since a file's last sync any subset of its sectors may have arrived, of names
created, renamed or removed since a folder's last sync any subset. A killed process loses nothing.
"""

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expertmesh.actors.state.disk.files import Buffer, Files

SECTOR = 512


@dataclass
class Inode:
    """writes: since the last sync, (offset, data), or (size, None) for a change of the size."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)


@dataclass
class Disk:
    """names: of files as they are now; durable: as of the folders' last syncs; changes: since then,
    (path, inode), None for a removal."""

    names: dict[Path, Inode] = field(default_factory=dict)
    durable: dict[Path, Inode] = field(default_factory=dict)
    changes: list[tuple[Path, Inode | None]] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)

    def change(self, path: Path, inode: Inode | None) -> None:
        self.changes.append((path, inode))
        if inode is None:
            self.names.pop(path, None)
        else:
            self.names[path] = inode

    def after_kill(self) -> "Disk":
        """All that any process has written is there."""
        copies = {id(inode): _whole(inode.data) for inode in self.names.values()}
        names = {path: copies[id(inode)] for path, inode in self.names.items()}
        return Disk(names, dict(names), [], set(self.folders))

    def after_power_failure(self, rng: random.Random) -> "Disk":
        kept = dict(self.durable)
        for path, inode in self.changes:
            if rng.random() < 0.5:
                if inode is None:
                    kept.pop(path, None)
                else:
                    kept[path] = inode
        copies = {id(inode): _torn(inode, rng) for inode in kept.values()}
        names = {path: copies[id(inode)] for path, inode in kept.items()}
        return Disk(names, dict(names), [], set(self.folders))


def _whole(data: bytes | bytearray) -> Inode:
    return Inode(bytearray(data), bytes(data))


def _torn(inode: Inode, rng: random.Random) -> Inode:
    data = bytearray(inode.durable)
    for offset, written in inode.writes:
        if written is None:
            if rng.random() < 0.5:
                _resize(data, offset)
            continue
        if rng.random() < 0.3:  # nothing of it
            continue
        share = rng.choice((0.2, 0.8, 1.0))
        for start in range(0, len(written), SECTOR):
            if rng.random() < share:
                _put(data, offset + start, written[start : start + SECTOR])
    return _whole(data)


def _put(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset:
        _resize(data, offset)
    data[offset : offset + len(written)] = written


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


class SimulatedFiles(Files):
    """Of one process. after: called after each operation that changes the disk, with its name.
    fail: called before each operation with its name and path; raises what shall go wrong. locks:
    those held, of all processes that are given the same set."""

    def __init__(
        self,
        disk: Disk,
        after: Callable[[str], None] = lambda operation: None,
        fail: Callable[[str, Path], None] = lambda operation, path: None,
    ) -> None:
        self.disk, self.after, self.fail = disk, after, fail
        self.locks: set[Path] = set()
        self._open: dict[int, tuple[Path, Inode]] = {}
        self._held: dict[int, Path] = {}
        self._next = 3

    def make_folder(self, path: Path) -> None:
        self.fail("make_folder", path)
        self.disk.folders.add(path)

    def names(self, path: Path) -> list[str]:
        self.fail("names", path)
        return sorted(file.name for file in self.disk.names if file.parent == path)

    def folders(self, path: Path) -> list[Path]:
        self.fail("folders", path)
        return sorted(folder for folder in self.disk.folders if folder.parent == path)

    def _descriptor(self, path: Path, inode: Inode) -> int:
        self._next += 1
        self._open[self._next] = path, inode
        return self._next

    def create(self, path: Path) -> int:
        self.fail("create", path)
        inode = Inode()
        self.disk.change(path, inode)
        self.after("create")
        return self._descriptor(path, inode)

    def open(self, path: Path) -> int:
        self.fail("open", path)
        return self._descriptor(path, self._inode(path))

    def _inode(self, path: Path) -> Inode:
        inode = self.disk.names.get(path)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
        return inode

    def close(self, fd: int) -> None:
        if fd in self._held:
            self.locks.discard(self._held.pop(fd))
        else:
            del self._open[fd]

    def lock(self, path: Path) -> int | None:
        self.fail("lock", path)
        if path in self.locks:
            return None
        self.locks.add(path)
        self._next += 1
        self._held[self._next] = path
        return self._next

    def allocate(self, fd: int, size: int) -> None:
        path, inode = self._open[fd]
        self.fail("allocate", path)
        if len(inode.data) < size:
            self._size(inode, size)
            self.after("allocate")

    def truncate(self, path: Path, size: int) -> None:
        self.fail("truncate", path)
        self._size(self._inode(path), size)
        self.after("truncate")

    def _size(self, inode: Inode, size: int) -> None:
        _resize(inode.data, size)
        inode.writes.append((size, None))

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        path, inode = self._open[fd]
        self.fail("write", path)
        data = b"".join(buffers)
        _put(inode.data, offset, data)
        inode.writes.append((offset, data))
        self.after("write")

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path, inode = self._open[fd]
        self.fail("read", path)
        done = 0
        for view in buffers:
            piece = inode.data[offset + done : offset + done + len(view)]
            view[: len(piece)] = piece
            done += len(piece)
        return done

    def still_named(self, fd: int, path: Path) -> bool:
        if fd in self._held:
            return True
        return self.disk.names.get(path) is self._open[fd][1]

    def size(self, path: Path) -> int:
        return len(self._inode(path).data)

    def sync(self, fd: int) -> None:
        path, inode = self._open[fd]
        self.fail("sync", path)
        inode.durable = bytes(inode.data)
        inode.writes.clear()
        self.after("sync")

    def sync_folder(self, path: Path) -> None:
        self.fail("sync_folder", path)
        later = []
        for file, inode in self.disk.changes:
            if file.parent != path:
                later.append((file, inode))
            elif inode is None:
                self.disk.durable.pop(file, None)
            else:
                self.disk.durable[file] = inode
        self.disk.changes = later
        self.after("sync_folder")

    def rename(self, source: Path, target: Path) -> None:
        self.fail("rename", source)
        inode = self._inode(source)
        # One change of two names: the file is under one of them after a failure, or both.
        self.disk.change(target, inode)
        self.disk.change(source, None)
        self.after("rename")

    def unlink(self, path: Path) -> None:
        self.fail("unlink", path)
        if path in self.disk.names:
            self.disk.change(path, None)
            self.after("unlink")

    def allocated(self, path: Path) -> int:
        self.fail("allocated", path)
        return sum(
            -(-len(inode.data) // 4096) * 4096
            for file, inode in self.disk.names.items()
            if file.parent == path
        )
