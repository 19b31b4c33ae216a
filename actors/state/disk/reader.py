"""Reading records of any folder, verified every time (kv-state 3.8 item 3). Any thread."""

import errno
import time
from collections.abc import Callable

import numpy as np

from expertmesh.actors.state.disk.counters import Counters, label
from expertmesh.actors.state.disk.errors import DiskFailed, failed
from expertmesh.actors.state.disk.files import Buffer, Files
from expertmesh.actors.state.disk.folder import segment_path
from expertmesh.actors.state.disk.handles import Handles
from expertmesh.actors.state.disk.library import Found, Library
from expertmesh.actors.state.disk.record import HEADER_BYTES, Damaged, Record, decode
from expertmesh.actors.state.disk.seal import Seal
from expertmesh.actors.state.item import Name

Allocate = Callable[[int], Buffer]

# Bytes that are good for another configuration of the server: not ours to delete.
FOREIGN = frozenset({"version", "layout", "sealed"})
MOST_COPIES = 8
MOST_SPOILED = 4096  # names


class Reader:
    """spoiled: what of late was not there as it should be, with the label that counts it."""

    def __init__(
        self, files: Files, library: Library, layout: bytes, seal: Seal | None, counters: Counters
    ) -> None:
        self._files, self._library, self._counters = files, library, counters
        self._layout, self._seal = layout, seal
        self.handles = Handles(files)
        self.spoiled: dict[Name, str] = {}

    def read(self, name: Name, allocate: Allocate | None = None) -> Record | None:
        """None where no intact copy is left. Raises DiskFailed: nothing is known of the copy."""
        for _ in range(MOST_COPIES):
            found = self._library.find(name)
            if found is None:
                break
            record = self.verify(found, allocate)
            if record is not None:
                return record
        else:
            return None
        self._counters.fail("missing")
        return None

    def verify(self, found: Found, allocate: Allocate | None = None) -> Record | None:
        """The record at a place; None, and the place is not looked at again, where it is none."""
        place, began = found.entry.place, time.perf_counter()
        head = memoryview(bytearray(HEADER_BYTES))
        size = place.nbytes - HEADER_BYTES
        # Not a bytearray: that one would be zeroed first, at the cost of the read itself.
        buffer = allocate(size) if allocate else np.empty(size, np.uint8).data
        body = memoryview(buffer).cast("B")[:size]
        try:
            count = self._fill(found, [head, body])
            read = time.perf_counter()
            if count < place.nbytes:
                raise Damaged("short")
            record = decode(head, body, found.entry.name, self._layout, place, self._seal)
        except Damaged as damage:
            self._counters.fail(damage.reason)
            if len(self.spoiled) >= MOST_SPOILED:
                self.spoiled.clear()
            self.spoiled[found.entry.name] = label(damage.reason)
            self._library.quarantine(found.entry, lasting=damage.reason not in FOREIGN)
            return None
        except DiskFailed:
            self._counters.fail("io")
            raise
        self.spoiled.pop(found.entry.name, None)
        self._library.touch(found.entry)
        self._counters.read(place.nbytes, read - began, time.perf_counter() - read)
        return record

    def _fill(self, found: Found, buffers: list[memoryview]) -> int:
        place = found.entry.place
        path = segment_path(found.folder, place.segment)
        try:
            handle = self.handles.acquire(place.segment, path)
            try:
                return self._files.read(handle.fd, buffers, place.offset)
            finally:
                self.handles.release(handle)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):  # its writer has evicted it
                raise Damaged("vanished") from error
            raise failed(f"reading {path}", error) from error
