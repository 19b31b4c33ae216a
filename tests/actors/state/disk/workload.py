"""Random use of a disk log, with a memory of what it was told and what it has promised."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

from expertmesh.actors.state.disk.errors import DiskFull
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Header, Kind, Name

ROOT = Path("/store")
LAYOUT = b"layout-of-a-test"
SEGMENT = 32 << 10
CODECS = ("raw", "lossless", "int8")


def open_log(
    files: Files, root: Path = ROOT, segments: int = 64, secret: bytes | None = None
) -> DiskLog:
    return DiskLog.open(
        root,
        capacity=segments * SEGMENT,
        layout=LAYOUT,
        segment_bytes=SEGMENT,
        secret=secret,
        files=files,
        clock=itertools.count(0.0, 10.0).__next__,  # what is full is tried again soon
    )


def header(number: int, kind: Kind = Kind.PAGE, position: int | None = None) -> Header:
    tokens = tuple(range(number, number + 64)) if kind is not Kind.SESSION else ()
    at = 64 * number if position is None else position
    lineage = "decode" if number % 3 == 0 else "prefill"
    return Header(number.to_bytes(32, "big"), kind, b"p" * 32, at, tokens, lineage, LAYOUT)


def payload(header: Header) -> bytes:
    """Bytes that follow from the header, so that any answer can be checked without a copy."""
    rng = random.Random(f"{header.key.hex()} {header.kind} {header.position}")
    return rng.randbytes(rng.choice((0, 1, 100, 511, 3000, 5000, 9000)))


class Corrupt(AssertionError):
    """The log has returned something that was never appended."""


class Lost(AssertionError):
    """Something that was acknowledged is gone."""


class Unnoticed(AssertionError):
    """Something went wrong on the disk, and neither a counter nor an error tells of it."""


def check_record(log: DiskLog, name: Name) -> int | None:
    """Position of what is read under a name, None for a miss. Raises Corrupt."""
    record = log.read(name)
    if record is None:
        return None
    wanted = header(int.from_bytes(name.key, "big"), name.kind, record.header.position)
    raw = len(payload(wanted))
    if record.header != wanted or record.raw_bytes != raw or record.codec not in CODECS:
        raise Corrupt(f"{record.header} is not {wanted}")
    if bytes(record.payload) != payload(wanted):
        raise Corrupt(f"bytes of {name}")
    return record.header.position


class Workload:
    """promised: position of what the log has acknowledged and must have; pinned: the part of it
    that eviction must not take. told: everything that was ever appended. tell: called before each
    promise is taken back or asked for, and after it was given. first: the lowest number that its
    items have. peers: those that use the same log."""

    def __init__(self, seed: int, pin_share: float = 0.3, first: int = 0) -> None:
        self.rng = random.Random(seed)
        self.promised: dict[Name, int] = {}
        self.pinned: set[Name] = set()
        self.told: set[Name] = set()
        self._waiting: dict[Name, list[tuple[int, bool]]] = {}
        self.refused = 0
        self.peers: list[Workload] = []
        self.tell: Callable[[], None] | None = None
        self._pin_share = pin_share
        self._first = self._number = first

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "tell": None}

    def step(self, log: DiskLog) -> None:
        """One operation. Promises change as soon as one is taken back, and when one was given."""
        kind = self.rng.random()
        if kind < 0.62:
            self._append(log)
        elif kind < 0.82:
            self.sync(log)
        elif kind < 0.90 and self.told:
            self._remove(log)
        elif kind < 0.94 and self.pinned:
            name = self.rng.choice(sorted(self.pinned))
            self.pinned.discard(name)
            if name in self._waiting:
                self._waiting[name] = [(at, False) for at, _ in self._waiting[name]]
            self._say()
            log.unpin([name])
        elif self.told:
            check_record(log, self.rng.choice(sorted(self.told)))

    def _append(self, log: DiskLog) -> None:
        kind = self.rng.choice((Kind.PAGE, Kind.PAGE, Kind.SNAPSHOT, Kind.SESSION))
        if kind is Kind.SESSION:
            item = header(self._first + self.rng.randrange(4), kind, self.rng.randrange(1 << 30))
        else:
            self._number += self.rng.random() < 0.9
            item = header(self._number, kind)
        data = payload(item)
        cut = self.rng.randrange(len(data) + 1)
        pinned = self.rng.random() < self._pin_share
        self.told.add(item.name)
        waiting = self._waiting.setdefault(item.name, [])
        waiting.append((item.position, pinned))
        self._say()
        pieces = [data[:cut], data[cut:]]
        try:
            new = log.append(item, self.rng.choice(CODECS), len(data), pieces, pinned=pinned)
        except DiskFull:
            self.refused += 1
            new = pinned = False
        if not new and not pinned:
            waiting.pop()

    def sync(self, log: DiskLog) -> None:
        done = set(log.sync())
        for workload in (self, *self.peers):
            workload._heard(done)
        self._say()

    def _heard(self, done: set[Name]) -> None:
        for name, waiting in self._waiting.items():
            known = name in self.promised and name.kind is not Kind.SESSION
            if waiting and (name in done or known):
                self.promised[name], pinned = waiting[-1]
                if pinned:
                    self.pinned.add(name)
        self._waiting.clear()

    def _say(self) -> None:
        if self.tell is not None:
            self.tell()

    def _remove(self, log: DiskLog) -> None:
        name = self.rng.choice(sorted(self.told))
        self.promised.pop(name, None)
        self.pinned.discard(name)
        self._waiting.pop(name, None)
        self._say()
        log.remove([name])

    def verify(self, log: DiskLog, evicting: bool = False) -> int:
        """Reads all that was ever told; returns how many items were there. Raises Corrupt or Lost.

        evicting: only what is pinned must be there. A session may be newer than promised, when the
        disk was cut off on the way to its acknowledgement.
        """
        there = 0
        for name in self.told:
            position = check_record(log, name)
            there += position is not None
            must = name in (self.pinned if evicting else self.promised)
            if must and position is None:
                raise Lost(f"{name} of {len(self.promised)} promised")
            newer = [at for at, _ in self._waiting.get(name, ())]
            if must and position not in (self.promised[name], *newer):
                raise Lost(f"{name} is at {position}, {self.promised[name]} was promised")
        return there

    def forget_unacknowledged(self, log: DiskLog) -> None:
        """After a restart: what was on the way has arrived or not, and counts as it stands now."""
        self._waiting.clear()
        self.promised = {
            name: position for name in self.promised if (position := log.position(name)) is not None
        }
        self.pinned &= self.promised.keys()
        self.told = set(self.promised)

    def unpin(self, log: DiskLog, keep: int) -> None:
        """So that a store that lives for long does not fill up with what must stay."""
        extra = sorted(self.pinned)[keep:]
        self.pinned.difference_update(extra)
        log.unpin(extra)
