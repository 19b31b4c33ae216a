"""What the engine asks of the tiers below the device. `tiers/` implements it.

All calls come from the engine's thread and none of them waits for a device or a disk, nor for a
lock that is held while one works.
Everything that fails is a miss: the engine recomputes, and the store counts why.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from expertmesh.actors.state.alike import runs
from expertmesh.actors.state.item import Header, Item, Kind, Name, Tier
from expertmesh.actors.state.stats import StoreStats


class Layered(Protocol):
    """What can be had layer by layer."""

    def layer(self, part: int, index: int, out: Tensor) -> None:
        """Writes layer `index` of part `part` into `out`, on any device. Cannot fail: it was
        verified before. Any thread; calls for different layers may run at the same time."""
        ...


class Loaded(Layered, Protocol):
    """A verified item in host memory, perhaps still packed. It belongs to its fetch."""

    @property
    def header(self) -> Header: ...

    @property
    def exact(self) -> bool:
        """Whether it gives back the bytes that were stored."""
        ...

    @property
    def nbytes(self) -> int:
        """Of what was read."""
        ...

    @property
    def raw_bytes(self) -> int:
        """Of what `layer` gives back, all layers together."""
        ...

    @property
    def tier(self) -> Tier: ...


@runtime_checkable
class Batched(Protocol):
    """Of a class of loaded items that can be had together for less than one by one."""

    @staticmethod
    def layers(
        items: Sequence[Any], part: int, index: int, out: Tensor, rows: Sequence[int]
    ) -> None:
        """As `layer` of items[i], which are of this class, into out[rows[i]]."""
        ...


def fill_layer(
    items: Sequence[Layered], part: int, index: int, out: Tensor, rows: Sequence[int]
) -> None:
    """Layer `index` of part `part` of items[i], of whatever class, into out[rows[i]], all rows
    different; out [any, *shape of the layer], on any device."""
    for run in runs(map(type, items)):
        alike, places = items[run], rows[run]
        first = alike[0]
        if isinstance(first, Batched):
            first.layers(alike, part, index, out, places)
        else:
            for item, row in zip(alike, places, strict=True):
                item.layer(part, index, out[row])


class Fetch(Protocol):
    """One load of several items, all or nothing, with a deadline."""

    @property
    def done(self) -> bool: ...

    @property
    def items(self) -> list[Loaded] | None:
        """In the order asked for; None when any of them could not be had. Only when done."""
        ...

    @property
    def reason(self) -> str:
        """Why items is None: missing, corrupt, sealed, timeout, cancelled, busy,
        io, full, error, closed."""
        ...

    @property
    def nbytes(self) -> int:
        """Read below the device for it, packed; 0 until done."""
        ...

    @property
    def verify_seconds(self) -> float:
        """Spent on hashes of what was read for it; 0 until done."""
        ...

    def cancel(self) -> None:
        """Nobody wants it any more; what it holds is let go. Idempotent, also when done."""
        ...


class Store(Protocol):
    @property
    def durable(self) -> bool:
        """Whether there is a disk below it, in whatever state."""
        ...

    def where(self, name: Name, exact: bool = True) -> Tier | None:
        """The highest tier that has it, as far as is known without looking; "hot" is never the
        answer. None also for what failed to load lately. exact: an estimate does not count."""
        ...

    def on_disk(self, name: Name) -> bool:
        """Whether the disk has it, whatever is above, as far as is known without looking."""
        ...

    def touch(self, names: Sequence[Name]) -> None:
        """Somebody has used the device's copies: what is popular there is worth keeping below."""
        ...

    def put(self, item: Item, *, durable: bool = False, pinned: bool = False) -> bool:
        """Takes an item over. False: no room or no time, it is not stored. durable: on to the disk
        without waiting for a second use. pinned: never evicted from where it is until unpinned."""
        ...

    def fetch(self, names: Sequence[Name], timeout_s: float, exact: bool = True) -> Fetch:
        """Starts to load. Loads of the same item share one read. `wake` (of the constructor) is
        called when done. exact: what can only be had approximately is missing."""
        ...

    def load_seconds(self, names: Sequence[Name]) -> float:
        """Estimate from the measured bandwidth of the tiers and what is queued there."""
        ...

    def flush(self) -> Fetch:
        """Done when everything put as durable before is on disk and synced; items is [] then."""
        ...

    def keep(self, names: Sequence[Name], pinned: bool = False) -> list[Name]:
        """Makes what is stored already durable. Returns the names that no tier has, or that find
        no room."""
        ...

    def position(self, name: Name) -> int:
        """The greatest Header.position of it that a tier is known to have; -1 for none."""
        ...

    def positions(self, kind: Kind) -> Mapping[Name, int]:
        """Of everything of that kind. O(items of it), of pages and snapshots O(all items)."""
        ...

    def pin(self, names: Sequence[Name]) -> None:
        """As put with pinned, for what is there already. Not counted: one unpin undoes any number
        of pins."""
        ...

    def unpin(self, names: Sequence[Name]) -> None: ...

    def drop(self, names: Sequence[Name]) -> None:
        """Removes items from every tier, such as a checkpoint that a newer one replaces."""
        ...

    def look(self) -> Fetch:
        """Takes note of what other replicas have written to the disk. Done when it has, or when
        that takes too long; nothing is loaded."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is durable, ends the threads. Idempotent."""
        ...
