"""A store of dictionaries: host memory per replica, and a disk that several may share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from expertmesh.actors.state.item import Header, Item, Kind, Name, StateLayout, Tier
from expertmesh.actors.state.stats import StoreStats

LAYOUT = StateLayout((1, 64, 4), (1, 1, 2, 2), (1, 3, 6), torch.float32)


@dataclass
class FakeLoaded:
    header: Header
    item: Item
    tier: Tier
    exact: bool = True

    @property
    def nbytes(self) -> int:
        return self.item.nbytes

    @property
    def raw_bytes(self) -> int:
        return self.item.nbytes

    def layer(self, part: int, index: int, out: torch.Tensor) -> None:
        content = self.item.parts[part]
        out.copy_(content if content.dim() == 1 else content[index])


@dataclass
class FakeFetch:
    """result: None while it goes on and after it has failed."""

    items: list[FakeLoaded] | None = None
    reason: str = ""
    done: bool = True
    verify_seconds: float = 0.25
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = self.done = True
        self.reason = "cancelled"


@dataclass
class FakeDisk:
    """What is `written` becomes `items` when it is synced. room: items that fit."""

    items: dict[Name, Item] = field(default_factory=dict)
    written: dict[Name, Item] = field(default_factory=dict)
    pinned: set[Name] = field(default_factory=set)
    room: int = 1 << 30
    broken: str = ""  # why the next syncs fail

    def write(self, item: Item) -> bool:
        if len(self.items | self.written) >= self.room:
            return False
        self.written[item.header.name] = item
        return True

    def sync(self) -> bool:
        for name, item in ({} if self.broken else self.written).items():
            old = self.items.get(name)
            if old is None or old.header.position < item.header.position:
                self.items[name] = item
        self.written = {}
        return not self.broken


class FakeStore:
    """slow: fetches wait until a test ends them. lost: names that no fetch brings. full: host
    memory takes nothing."""

    def __init__(self, disk: FakeDisk | None = None) -> None:
        self.durable = disk is not None
        self.host: dict[Name, Item] = {}
        self.disk = disk or FakeDisk()
        self.pins = 0
        self.slow = self.full = False
        self.lost: set[Name] = set()
        self.waiting: list[tuple[FakeFetch, list[Name] | None]] = []  # None: a flush
        self.held: list[FakeFetch] = []

    def where(self, name: Name, exact: bool = True) -> Tier | None:
        if name in self.host:
            return "host"
        return "disk" if name in self.disk.items or name in self.disk.written else None

    def on_disk(self, name: Name) -> bool:
        return name in self.disk.items

    def put(self, item: Item, *, durable: bool = False, pinned: bool = False) -> bool:
        if self.full or (durable and not self.disk.write(item)):
            return False
        self.host[item.header.name] = item
        return True

    def keep(self, names: Sequence[Name], pinned: bool = False) -> list[Name]:
        missing = []
        for name in names:
            if self.where(name) == "host":
                if not self.disk.write(self.host[name]):
                    missing.append(name)
            elif self.where(name) is None:
                missing.append(name)
        return missing

    def fetch(self, names: Sequence[Name], timeout_s: float, exact: bool = True) -> FakeFetch:
        assert timeout_s > 0
        fetch = FakeFetch(done=False)
        self.held.append(fetch)
        self.waiting.append((fetch, list(names)))
        if not self.slow:
            self.finish()
        return fetch

    def finish(self) -> None:
        """Ends all loads under way."""
        waiting, self.waiting = self.waiting, []
        for fetch, names in waiting:
            fetch.done = True
            if names is None:
                fetch.items = [] if self.disk.sync() else None
                fetch.reason = self.disk.broken
                continue
            if any(name in self.lost or self.where(name) is None for name in names):
                fetch.reason = "missing"
                continue
            items = [self._newest(name) for name in names]
            fetch.items = [
                FakeLoaded(item.header, item, self.where(item.header.name) or "disk")
                for item in items
            ]

    def _newest(self, name: Name) -> Item:
        here, there = self.host.get(name), self.disk.items.get(name)
        if here is None or (there and there.header.position > here.header.position):
            assert there is not None
            return there
        return here

    def load_seconds(self, names: Sequence[Name]) -> float:
        return 0.0

    def flush(self) -> FakeFetch:
        fetch = FakeFetch(done=False)
        self.waiting.append((fetch, None))
        if not self.slow:
            self.finish()
        return fetch

    def position(self, name: Name) -> int:
        return self.positions(name.kind).get(name, -1)

    def positions(self, kind: Kind) -> Mapping[Name, int]:
        known = [*self.disk.items.values(), *self.disk.written.values()]
        found: dict[Name, int] = {}
        for header in (item.header for item in known if item.header.kind is kind):
            found[header.name] = max(header.position, found.get(header.name, 0))
        return found

    def pin(self, names: Sequence[Name]) -> None:
        self.disk.pinned.update(names)

    def unpin(self, names: Sequence[Name]) -> None:
        self.disk.pinned.difference_update(names)

    def touch(self, names: Sequence[Name]) -> None: ...

    def drop(self, names: Sequence[Name]) -> None:
        for name in names:
            for where in (self.host, self.disk.items, self.disk.written):
                where.pop(name, None)

    def look(self) -> FakeFetch:  # the disk is these dictionaries
        return FakeFetch(items=[])

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self, timeout_s: float = 5.0) -> None: ...


class FakeDevice:
    """Pages and snapshots that are still on the device."""

    def __init__(self) -> None:
        self.there: dict[Name, Item] = {}

    def has(self, name: Name) -> bool:
        return name in self.there

    def items(self, names: Sequence[Name]) -> list[Item]:
        return [self.there[name] for name in names if name in self.there]
