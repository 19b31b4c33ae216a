"""Items, a clock and a disk for tests of the tiers: whatever a disk can do wrong on request."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import cast

import torch

from expertmesh.actors.state.disk.errors import DiskFailed, DiskFull
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.disk.record import Record
from expertmesh.actors.state.item import Header, Item, Kind, Lineage, Name, StateLayout
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.store import Fetch, Loaded, Store

LAYOUT = StateLayout(page=(2, 64, 8), kda=(2, 1, 4, 4), conv=(2, 3, 12), dtype=torch.float32)
PAGE_BYTES = LAYOUT.nbytes(Kind.PAGE)
PATIENCE_S = 20.0  # of a test that waits for a thread; reached only when something is broken


def page(tag: str, at: int, lineage: Lineage = "prefill", layout: StateLayout = LAYOUT) -> Item:
    """Page `at` of the chain called `tag`, with contents that follow from both."""
    header = Header(
        key=_key(tag, at),
        kind=Kind.PAGE,
        parent=_key(tag, at - 1),
        position=64 * (at + 1),
        tokens=tuple(range(64)),
        lineage=lineage,
        layout=layout.fingerprint,
    )
    return Item(header, (_values(f"{tag} {at}", layout.page).to(layout.dtype),))


def pages(tag: str, count: int) -> list[Item]:
    return [page(tag, at) for at in range(count)]


def snapshot(tag: str, at: int, layout: StateLayout = LAYOUT) -> Item:
    """The state after page `at`."""
    header = Header(
        _key(tag, at), Kind.SNAPSHOT, _key(tag, at - 1), 64 * (at + 1), (), "prefill",
        layout.fingerprint,
    )  # fmt: skip
    parts = (
        _values(f"kda {tag} {at}", layout.kda),
        _values(f"conv {tag} {at}", layout.conv).to(layout.dtype),
    )
    return Item(header, parts)


def session(tag: str, version: int) -> Item:
    text = f"{tag} {version}".encode()
    header = Header(_key(tag, 0), Kind.SESSION, b"", version, (), "prefill", LAYOUT.fingerprint)
    return Item(header, (torch.frombuffer(bytearray(text), dtype=torch.uint8)[None],))


def names(items: Sequence[Item]) -> list[Name]:
    return [item.header.name for item in items]


def same(item: Item, loaded: Loaded) -> bool:
    """Whether every layer of every part has the item's bits; what is not written stays NaN."""
    if loaded.header != item.header:
        return False
    for part, tensor in enumerate(item.parts):
        for index, layer in enumerate(tensor):
            out = torch.full_like(layer, float("nan") if layer.is_floating_point() else 255)
            loaded.layer(part, index, out)
            if not torch.equal(out, layer):
                return False
    return True


def until(condition: Callable[[], bool]) -> None:
    """Waits for a background thread. Raises AssertionError when it takes unreasonably long."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "a background thread has not done it"
        time.sleep(0.0005)


def put(store: Store, items: Sequence[Item], **how: bool) -> bool:
    """Whether all were taken at once."""
    return [store.put(item, **how) for item in items] == [True] * len(items)


def press(store: Store, item: Item, **how: bool) -> None:
    """Until it is taken: queues empty themselves."""
    until(lambda: store.put(item, **how))


def finished(fetch: Fetch) -> Fetch:
    until(lambda: fetch.done)
    return fetch


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeDisk:
    """A DiskLog in memory. reading, writing: cleared, such calls hang. failing: raised by all
    calls that touch the device. full: nothing more is taken. damaged: names whose reads are
    misses. dying: the next read or sync ends its thread."""

    records: dict[Name, Record] = field(default_factory=dict)
    waiting: dict[Name, Record] = field(default_factory=dict)
    reading: threading.Event = field(default_factory=threading.Event)
    writing: threading.Event = field(default_factory=threading.Event)
    failing: Exception | None = None
    full: bool = False
    dying: bool = False
    damaged: set[Name] = field(default_factory=set)
    pinned: set[Name] = field(default_factory=set)
    reads: list[Name] = field(default_factory=list)
    started: list[Name] = field(default_factory=list)
    writes: int = 0  # calls that write, begun
    syncs: int = 0
    refreshes: int = 0
    refusals: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.reading.set()
        self.writing.set()

    @property
    def log(self) -> DiskLog:
        return cast(DiskLog, self)

    def append(
        self,
        header: Header,
        codec: str,
        raw_bytes: int,
        payload: Sequence[memoryview],
        *,
        pinned: bool = False,
    ) -> bool:
        self._write()
        if self.full:
            self.refusals += 1
            raise DiskFull("no room")
        if pinned:
            self.pinned.add(header.name)
        if header.name in self.records and header.kind is not Kind.SESSION:
            return False
        body = memoryview(b"".join(payload))
        self.waiting[header.name] = Record(header, codec, raw_bytes, body)
        return True

    def sync(self) -> list[Name]:
        self._write()
        done = list(self.waiting)
        self.records.update(self.waiting)
        self.waiting.clear()
        self.syncs += 1
        return done

    def read(self, name: Name) -> Record | None:
        found = self.read_all([name])[0]
        return None if isinstance(found, str) else found

    def read_all(self, names: Sequence[Name]) -> list[Record | str]:
        self.started += names
        assert self.reading.wait(PATIENCE_S)
        self._touch_device()
        self.reads += names
        lost = self.damaged  # and others may drop records meanwhile
        return ["missing" if n in lost else self.records.get(n, "missing") for n in names]

    def why(self, name: Name) -> str:
        return "missing"

    def remove(self, names: Sequence[Name]) -> None:
        for name in names:
            self.records.pop(name, None)
            self.waiting.pop(name, None)

    def pin(self, names: Sequence[Name]) -> list[Name]:
        self.pinned.update(name for name in names if name in self.records)
        return [name for name in names if name not in self.records]

    def unpin(self, names: Sequence[Name]) -> None:
        self.pinned.difference_update(names)

    def refresh(self) -> None:
        self._write()
        self.refreshes += 1

    def has(self, name: Name) -> bool:
        return name in self.records

    def nbytes(self, name: Name) -> int | None:
        return len(self.records[name].payload) if name in self.records else None

    def position(self, name: Name) -> int | None:
        return self.records[name].header.position if name in self.records else None

    def positions(self, kind: Kind) -> dict[Name, int]:
        return {n: r.header.position for n, r in self.records.items() if n.kind is kind}

    def stats(self) -> TierStats:
        failures = {"full": self.refusals} if self.refusals else {}
        read_only = "full" if self.full else ""
        return TierStats(items=len(self.records), failures=failures, read_only=read_only)

    def close(self) -> None:
        self.closed = True

    def _write(self) -> None:
        self.writes += 1
        assert self.writing.wait(PATIENCE_S)
        self._touch_device()

    def _touch_device(self) -> None:
        if self.dying:
            raise SystemExit("a thread dies")
        if self.failing is not None:
            raise self.failing


def broken_device() -> DiskFailed:
    return DiskFailed("Input/output error")


def _key(tag: str, at: int) -> bytes:
    return blake2b(f"{tag} {at}".encode(), digest_size=32).digest()


def _values(seed: str, shape: tuple[int, ...]) -> torch.Tensor:
    number = int.from_bytes(blake2b(seed.encode(), digest_size=7).digest(), "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))
