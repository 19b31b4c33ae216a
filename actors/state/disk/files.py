"""All that the disk tier asks of the operating system, so that tests can fail any of it.

Nothing else in this folder calls `os`. Methods raise OSError; sizes are bytes, descriptors are
plain integers and close on exec.
"""

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

IOV_MAX = 1024


class Files:
    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def create(self, path: Path) -> int:
        """A new file, for writing and reading; what had that name is emptied."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def open(self, path: Path) -> int:
        """For reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, path: Path) -> int | None:
        """The descriptor of a lock file that this process alone now holds, until it is closed or
        the process ends in any way; None where another one holds it. Never waits."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        return fd

    def allocate(self, fd: int, size: int) -> None:
        """Blocks for the first `size` bytes, so that a later write cannot find the disk full."""
        os.posix_fallocate(fd, 0, size)

    def truncate(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """All of the buffers, one behind the other, from `offset` on."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        while views:
            written = os.pwritev(fd, views[:IOV_MAX], offset)
            offset += written
            while views and written >= len(views[0]):
                written -= len(views.pop(0))
            if written:
                views[0] = views[0][written:]

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Fills the buffers, at most IOV_MAX; returns bytes read, fewer only at the file's end."""
        total = sum(map(len, buffers))
        done = os.preadv(fd, buffers, offset)
        while done < total:  # seldom: a signal, or the end
            count = os.preadv(fd, _behind(buffers, done), offset + done)
            if not count:
                break
            done += count
        return done

    def still_named(self, fd: int, path: Path) -> bool:
        """Whether an open file still has this name: it has neither been removed nor replaced."""
        try:
            there = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(there, os.fstat(fd))

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Makes creations, renames and removals in it last."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def allocated(self, path: Path) -> int:
        """Bytes of the blocks that the files right under a folder take, holes not counted."""
        total = 0
        with os.scandir(path) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:  # another replica evicts meanwhile
                    continue
        return total

    def folders(self, path: Path) -> list[Path]:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """What of the buffers is left to fill."""
    left = []
    for view in buffers:
        if done < len(view):
            left.append(view[done:])
        done = max(0, done - len(view))
    return left
