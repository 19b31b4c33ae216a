"""Reading records of any folder, verified every time (kv-state 3.8 item 3). Any thread."""

import errno
import time
from collections.abc import Callable, Sequence

import numpy as np

from expertmesh.actors.state.disk.counters import Counters, label
from expertmesh.actors.state.disk.errors import DiskFailed, failed
from expertmesh.actors.state.disk.files import IOV_MAX, Buffer, Files
from expertmesh.actors.state.disk.folder import segment_path
from expertmesh.actors.state.disk.handles import Handles
from expertmesh.actors.state.disk.library import Found, Library
from expertmesh.actors.state.disk.record import (
    ALIGN,
    HEADER_BYTES,
    Damaged,
    Record,
    aligned,
    decode,
)
from expertmesh.actors.state.disk.seal import Seal
from expertmesh.actors.state.item import Name

Allocate = Callable[[int], Buffer]

# Bytes that are good for another configuration of the server: not ours to delete.
FOREIGN = frozenset({"version", "layout", "sealed"})
MOST_COPIES = 8
MOST_SPOILED = 4096  # names
MOST_RUN = IOV_MAX // 3  # records read at once: each is a header, a body and what is behind
_PADDING = memoryview(bytearray(ALIGN))  # written by all, read by nobody


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

    def read_all(self, names: Sequence[Name]) -> list[Record | str]:
        """`read` of each, or the label of why there is nothing: neighbours of one segment are read
        in one operation, for small records cost more than their bytes (kv-state 2.1)."""
        records: dict[Name, Record] = {}
        for run in _runs([self._library.find(name) for name in names]):
            self._read_run(run, records)
        # All else alone, where it is judged alone.
        return [records.get(name) or self._outcome(name) for name in names]

    def _outcome(self, name: Name) -> Record | str:
        try:
            return self.read(name) or self.spoiled.get(name, "missing")
        except DiskFailed as error:
            return error.reason

    def _read_run(self, run: Sequence[Found], records: dict[Name, Record]) -> None:
        """Adds those that are intact, if the device gives them."""
        began, first = time.perf_counter(), run[0].entry.place
        heads = memoryview(bytearray(HEADER_BYTES * len(run)))
        buffers: list[memoryview] = []
        for at, found in enumerate(run):
            size = found.entry.place.nbytes - HEADER_BYTES
            buffers.append(heads[at * HEADER_BYTES : (at + 1) * HEADER_BYTES])
            buffers.append(np.empty(size, np.uint8).data)
            buffers.append(_PADDING[: -found.entry.place.nbytes % ALIGN])
        buffers.pop()
        try:
            count = self._fill(run[0], buffers)
        except (Damaged, DiskFailed):
            return
        read, intact, nbytes, verify_s = time.perf_counter(), 0, 0, 0.0
        for at, (_, entry) in enumerate(run):
            if entry.place.offset - first.offset + entry.place.nbytes > count:
                break
            head, body = buffers[3 * at], buffers[3 * at + 1]
            try:
                record = decode(head, body, entry.name, self._layout, entry.place, self._seal)
            except Damaged:
                continue
            records[entry.name] = record
            self.spoiled.pop(entry.name, None)
            intact, nbytes = intact + 1, nbytes + entry.place.nbytes
            verify_s += record.verify_seconds
        self._library.touch(run[0].entry)
        self._counters.read(intact, nbytes, read - began, verify_s)

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
        self._counters.read(1, place.nbytes, read - began, record.verify_seconds)
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


def _runs(places: Sequence[Found | None]) -> list[list[Found]]:
    """Two and more records that lie one behind the other."""
    by_place = sorted(filter(None, places), key=lambda found: found.entry.place)
    runs: list[list[Found]] = []
    for found in by_place:
        place = found.entry.place
        before = runs[-1][-1].entry.place if runs and len(runs[-1]) < MOST_RUN else None
        if before and place[:2] == (before.segment, before.offset + aligned(before.nbytes)):
            runs[-1].append(found)
        else:
            runs.append([found])
    return [run for run in runs if len(run) > 1]
