"""A store in memory whose every load can be delayed, refused or lost, by hand and by a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, uint8
from xxhash import xxh3_64_intdigest

from expertmesh.actors.state.item import Header, Item, Kind, Name, Tier
from expertmesh.actors.state.stats import StoreStats


def digest(item: Item) -> int:
    """Of all bytes of an item; what was handed over must never change."""
    value = 0
    for part in item.parts:
        value = xxh3_64_intdigest(part.contiguous().flatten().view(uint8).numpy(), seed=value)
    return value


@dataclass
class Stored:
    item: Item
    digest: int
    tier: Tier = "host"
    pinned: bool = False

    @property
    def header(self) -> Header:
        return self.item.header

    @property
    def exact(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.item.nbytes

    @property
    def raw_bytes(self) -> int:
        return self.item.nbytes

    def layer(self, part: int, index: int, out: Tensor) -> None:
        out.copy_(self.item.parts[part][index].view_as(out))


@dataclass
class Loading:
    """ticks: after so many it is done. items: None when it will fail."""

    ticks: int
    found: list[Stored] | None
    reason: str = ""
    done: bool = False
    verify_seconds: float = 0.0
    cancelled: bool = False

    @property
    def items(self) -> list[Stored] | None:
        return self.found if self.done and not self.cancelled else None

    def cancel(self) -> None:
        self.done = self.cancelled = True
        self.reason = self.reason or "cancelled"


@dataclass
class Faults:
    """Chances per call. delay: most ticks a load takes."""

    delay: int = 3
    fail: float = 0.0
    refuse: float = 0.0
    forget: float = 0.0


@dataclass
class MemoryStore:
    """The Store of some engines, shared by them as a node's disk is. `tick` lets loads go on."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: Faults = field(default_factory=Faults)
    stored: dict[Name, Stored] = field(default_factory=dict)
    loading: list[Loading] = field(default_factory=list)
    loads: int = 0
    failed: int = 0
    puts: int = 0
    durable: bool = False

    def where(self, name: Name) -> Tier | None:
        found = self.stored.get(name)
        return None if found is None else found.tier

    def on_disk(self, name: Name) -> bool:
        return self.where(name) == "disk"

    def put(self, item: Item, *, durable: bool = False, pinned: bool = False) -> bool:
        if self.rng.random() < self.faults.refuse:
            return False
        self.puts += 1
        name, made = item.header.name, digest(item)
        known = self.stored.get(name)
        if known is not None:
            # One name, one content, whoever has made it: what every hit relies on.
            assert known.digest == made, f"{name.kind.name} {name.key.hex()[:8]}: other bytes"
            known.pinned |= pinned
            return True
        self.stored[name] = Stored(item, made, "disk" if durable else "host", pinned)
        return True

    def fetch(self, names: Sequence[Name], timeout_s: float, exact: bool = True) -> Loading:
        self.loads += 1
        found = [self.stored[name] for name in names if name in self.stored]
        reason = "" if len(found) == len(names) else "missing"
        if not reason and self.rng.random() < self.faults.fail:
            reason = self.rng.choice(("corrupt", "timeout", "busy"))
        self.failed += bool(reason)
        if reason and self.rng.random() < 0.5:  # a store remembers what it could not read
            for name in names:
                self.stored.pop(name, None)
        load = Loading(self.rng.randint(0, self.faults.delay), None if reason else found, reason)
        load.done = load.ticks == 0
        self.loading.append(load)
        return load

    def tick(self) -> None:
        """A moment passes: loads come nearer, and what nobody has pinned may be forgotten."""
        for load in self.loading:
            load.ticks -= 1
            load.done = load.done or load.ticks <= 0
        self.loading = [load for load in self.loading if not load.done]
        if self.rng.random() < self.faults.forget:
            self.forget(0.3)

    def forget(self, share: float) -> None:
        for name in [name for name, each in self.stored.items() if not each.pinned]:
            if self.rng.random() < share:
                del self.stored[name]

    def check(self) -> None:
        """No item was written to after it was handed over."""
        for name, each in self.stored.items():
            assert digest(each.item) == each.digest, f"{name} was written to"

    def load_seconds(self, names: Sequence[Name]) -> float:
        return 0.0

    def flush(self) -> Loading:
        return Loading(0, [], done=True)

    def keep(self, names: Sequence[Name], pinned: bool = False) -> list[Name]:
        for name in names:
            if name in self.stored:
                self.stored[name].tier = "disk"
                self.stored[name].pinned |= pinned
        return [name for name in names if name not in self.stored]

    def position(self, name: Name) -> int:
        return self.positions(name.kind).get(name, -1)

    def positions(self, kind: Kind) -> dict[Name, int]:
        return {n: each.header.position for n, each in self.stored.items() if n.kind is kind}

    def touch(self, names: Sequence[Name]) -> None:
        pass

    def pin(self, names: Sequence[Name]) -> None:
        for name in names:
            if name in self.stored:
                self.stored[name].pinned = True

    def unpin(self, names: Sequence[Name]) -> None:
        for name in names:
            if name in self.stored:
                self.stored[name].pinned = False

    def drop(self, names: Sequence[Name]) -> None:
        for name in names:
            if name in self.stored and not self.stored[name].pinned:
                del self.stored[name]

    def look(self) -> Loading:
        return Loading(0, [], done=True)

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self, timeout_s: float = 5.0) -> None:
        pass
