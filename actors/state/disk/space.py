"""How much the replicas of a node put into their common folder, and what goes first.

Capacity counts allocated blocks and fails closed: a segment is begun only if it and one more fit,
the spare one being for what eviction must copy on (kv-state 3.8 item 5).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from expertmesh.actors.state.disk.errors import DiskFailed, named
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.record import ALIGN, aligned
from expertmesh.actors.state.disk.writer import Writer

DEFAULT_SEGMENT = 256 << 20
# Fewer would make eviction by segment too coarse.
MIN_SEGMENTS = 16
# Segments, with the spare one, that whoever has more than a share leaves to others.
ELBOW_ROOM = 4
LOCK_TRIES = 200
LOCK_PAUSE_S = 0.005
# A segment whose pinned part is larger is copied only when there is no other.
CHEAP_COPY = 0.5
DEAREST_COPY = 0.875


class Victim(NamedTuple):
    writer: Writer
    segment: int


def segment_size(capacity: int, wanted: int = 0) -> int:
    """Bytes of an ordinary segment. Raises ValueError for a capacity that holds too few."""
    size = wanted or min(DEFAULT_SEGMENT, capacity // MIN_SEGMENTS // ALIGN * ALIGN)
    if size < ALIGN or size % ALIGN or capacity < 4 * size:
        raise ValueError(f"{capacity} bytes are too few for segments of {size} bytes")
    return size


class Space:
    """Of one root folder."""

    def __init__(self, files: Files, root: Path, capacity: int, segment: int) -> None:
        self.capacity, self.segment = capacity, segment
        self._files, self._root = files, root
        self.allocated = 0

    def measure(self) -> int:
        """Bytes allocated by all replicas. Raises DiskFailed."""
        with named(f"measuring {self._root}"):
            folders = self._files.folders(self._root)
            self.allocated = sum(self._files.allocated(folder) for folder in folders)
        return self.allocated

    def begin_segment(self, writer: Writer, nbytes: int, spare: bool) -> bool:
        """Whether a segment for a record of `nbytes` was begun under the cap. spare: into the
        reserve. One replica at a time measures and allocates, or the sum could exceed the cap."""
        size = max(self.segment, aligned(nbytes))
        lock = self._lock()
        try:
            if self.measure() + size + (0 if spare else self.segment) > self.capacity:
                return False
            writer.begin_segment(size)
            return True
        finally:
            self._files.close(lock)

    def _lock(self) -> int:
        with named(f"locking {self._root}"):
            for _ in range(LOCK_TRIES):
                lock = self._files.lock(self._root / "space.lock")
                if lock is not None:
                    return lock
                time.sleep(LOCK_PAUSE_S)
        raise DiskFailed(f"another replica keeps {self._root / 'space.lock'}", "busy")

    def crowded(self, writers: Sequence[Writer], replicas: int) -> bool:
        """Whether others can hardly begin a segment while these writers have more than a share."""
        if self.measure() + ELBOW_ROOM * self.segment <= self.capacity:
            return False
        with named(f"measuring {self._root}"):
            own = sum(self._files.allocated(writer.path) for writer in writers)
        return own > self.capacity // max(1, replicas) + self.segment


def victim(writers: Sequence[Writer], copying: bool = True) -> Victim | None:
    """The sealed segment to evict next: an empty one, else the one that was not used for longest
    among those that are cheap to copy on, else the one with the least to copy. None: all is pinned
    or still being written. copying: False for one with nothing to copy."""
    cheap: list[tuple[tuple[int, int], Victim]] = []
    dear: list[tuple[float, Victim]] = []
    for writer in writers:
        for number in writer.empty_segments():
            return Victim(writer, number)
        for number in writer.sealed_segments():
            held = writer.index.segments[number]
            share = held.pinned / max(held.end, 1)
            if held.pinned and not copying:
                continue
            if share <= CHEAP_COPY:
                cheap.append(((held.used, number), Victim(writer, number)))
            elif share <= DEAREST_COPY:
                dear.append((share, Victim(writer, number)))
    if cheap:
        return min(cheap, key=lambda pair: pair[0])[1]
    return min(dear, key=lambda pair: pair[0])[1] if dear else None
