"""Segments that are open for reading, so that the kernel reads on from one record to the next."""

import threading
from pathlib import Path

from expertmesh.actors.state.disk.files import Files

# Each may hold the blocks of a segment that another replica has evicted, until the next `keep`.
MOST = 16


class Handle:
    """retired: to be closed by its last user. A descriptor that is closed while it is used could be
    another file's by the time it is read from."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.retired = False


class Handles:
    """Any thread."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._handles: dict[int, Handle] = {}  # by segment, the last used at the end
        self._closed = False

    def acquire(self, segment: int, path: Path) -> Handle:
        """To be released after use. Raises OSError."""
        with self._lock:
            handle = self._handles.pop(segment, None)
            if handle is not None:
                handle.users += 1
                self._handles[segment] = handle
                return handle
        # Without the lock: it may take long. Two threads may both open it, and one gives way.
        handle = Handle(self._files.open(path))
        with self._lock:
            handle.retired = self._closed or segment in self._handles
            if not handle.retired:
                self._handles[segment] = handle
            surplus = list(self._handles)[: max(0, len(self._handles) - MOST)]
        self._retire(surplus)
        return handle

    def release(self, handle: Handle) -> None:
        with self._lock:
            handle.users -= 1
            last = handle.retired and not handle.users
        if last:
            self._files.close(handle.fd)

    def keep(self, living: set[int]) -> None:
        """Lets go of all segments but these, and so of the blocks of what was evicted."""
        self._retire([segment for segment in list(self._handles) if segment not in living])

    def close(self) -> None:
        self._closed = True
        self.keep(set())

    def _retire(self, segments: list[int]) -> None:
        for segment in segments:
            with self._lock:
                handle = self._handles.pop(segment, None)
                if handle is None:
                    continue
                handle.users += 1
                handle.retired = True
            self.release(handle)
