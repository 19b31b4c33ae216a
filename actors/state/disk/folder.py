"""Reading a folder that somebody writes, or wrote until he died.

    lock             held by the writer as long as its process lives
    index-G          checkpoint of generation G
    manifest-G       entries since then
    SEGMENT.seg      records

A reader takes no lock and may meet any state in between: a torn last entry, a generation that
ends while it reads, a segment that vanishes.
"""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from expertmesh.actors.state.disk.errors import DiskFailed, named
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.index import Index
from expertmesh.actors.state.disk.manifest import (
    ENTRY_BYTES,
    Checkpoint,
    unpack,
    unpack_checkpoint,
)

RETRIES = 5


@lru_cache(4096)  # asked for by every read
def segment_path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:016x}.seg"


def index_path(folder: Path, generation: int) -> Path:
    return folder / f"index-{generation:08d}"


def manifest_path(folder: Path, generation: int) -> Path:
    return folder / f"manifest-{generation:08d}"


def generations(names: list[str], kind: str) -> list[int]:
    """Ascending, of the files `kind-G`; temporary ones are not among them."""
    tails = (name.removeprefix(f"{kind}-") for name in names if name.startswith(f"{kind}-"))
    return sorted(int(tail) for tail in tails if tail.isdigit())


def segments(names: list[str]) -> list[int]:
    return [int(name[:16], 16) for name in names if name.endswith(".seg")]


def read_all(files: Files, path: Path, offset: int = 0) -> bytes:
    """From `offset` to where the file ends now."""
    size = files.size(path) - offset
    if size <= 0:
        return b""
    data = bytearray(size)
    fd = files.open(path)
    try:
        return bytes(data[: files.read(fd, [memoryview(data)], offset)])
    finally:
        files.close(fd)


@dataclass
class State:
    """A folder's index as of the end of a generation's manifest. sequence: of the next entry;
    offset: behind the last intact one; damaged: entries and checkpoints that could not be used;
    torn: what looks like an entry and is none, behind the last one, and a manifest not begun."""

    index: Index
    generation: int = 0
    sequence: int = 0
    offset: int = 0
    next_segment: int = 0
    damaged: int = 0
    torn: int = 0


def load(files: Files, path: Path, number: int) -> State:
    """From the newest usable checkpoint on. Raises DiskFailed, from FileNotFoundError where a live
    writer has ended a generation meanwhile."""
    with named(f"reading {path}"):
        names = files.names(path)
        state = State(Index(number))
        known = generations(names, "index")
        base = _checkpoint(files, path, known, state)
        state.next_segment = max(
            [base.next_segment if base else 0]
            + [(segment & 0xFFFFFFFF) + 1 for segment in segments(names)]
        )
        start = base.generation if base else 0
        logs = [g for g in generations(names, "manifest") if g >= start]
        sequence: int | None = base.sequence if base else None
        for generation in logs:
            state.offset = 0
            data = read_all(files, manifest_path(path, generation))
            _replay(state, data, sequence)
            sequence = None
        # The newest checkpoint begins a generation even when it has become unreadable.
        state.generation = max([*known, *logs, 0])
        if state.generation not in logs:
            state.offset = 0
            state.torn += bool(known)
        return state


def _checkpoint(files: Files, path: Path, known: list[int], state: State) -> Checkpoint | None:
    for generation in reversed(known):
        data = read_all(files, index_path(path, generation))
        base = unpack_checkpoint(data, generation)
        if base is not None:
            for entry in base.entries:
                state.index.apply(entry)
            state.sequence = base.sequence
            return base
        state.damaged += 1
    return None


def _replay(state: State, data: bytes, sequence: int | None) -> None:
    state.torn = 0
    for slot, (number, entry) in enumerate(unpack(data, sequence)):
        if entry is None:
            state.torn += 1
            continue
        state.index.apply(entry)
        state.damaged += state.torn
        state.torn = 0
        state.sequence, state.offset = number + 1, (slot + 1) * ENTRY_BYTES
    state.torn += len(data) % ENTRY_BYTES > 0


class FolderView:
    """Another writer's folder, followed."""

    def __init__(self, files: Files, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.index = Index(number)
        self.damaged = 0
        self._files = files
        self._state: State | None = None
        self._stuck = False

    def refresh(self) -> None:
        """Takes note of what was written since. Keeps what is known where a live writer replaces
        files faster than they can be read. Raises DiskFailed."""
        for _ in range(RETRIES):
            try:
                if self._state is None or self._newest() != self._state.generation:
                    self._load()
                else:
                    self._follow(self._state)
                return
            except DiskFailed as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def _newest(self) -> int:
        with named(f"listing {self.path}"):
            return max(generations(self._files.names(self.path), "index"), default=0)

    def _load(self) -> None:
        state = load(self._files, self.path, self.number)
        if state.offset:
            with named(f"syncing {self.path}"):
                self._settle(manifest_path(self.path, state.generation))
        self._state, self.index = state, state.index
        self.damaged += state.damaged
        self._stuck = False

    def _settle(self, path: Path) -> None:
        """What was read may be on its way to the disk only. We do not write again what we see
        here, so it has to be as lasting as if we had."""
        fd = self._files.open(path)
        try:
            self._files.sync(fd)
        finally:
            self._files.close(fd)

    def _follow(self, state: State) -> None:
        path = manifest_path(self.path, state.generation)
        with named(f"reading {path}"):
            data = read_all(self._files, path, state.offset)
            if data:
                self._settle(path)
        slots = list(unpack(data, state.sequence))
        for at, (number, entry) in enumerate(slots):
            if entry is not None:
                state.index.apply(entry)
            elif self._stuck and any(later for _, later in slots[at:]):
                self.damaged += 1
            else:  # most likely being written just now
                self._stuck = True
                return
            state.sequence, state.offset = number + 1, state.offset + ENTRY_BYTES
            self._stuck = False
