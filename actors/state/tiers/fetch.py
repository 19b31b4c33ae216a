"""One load of several items: what the engine holds while it waits, and what it gets."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from expertmesh.actors.state.item import Header, Name, Tier
from expertmesh.actors.state.store import Loaded
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.breaker import Clock
from expertmesh.actors.state.tiers.content import Content, write_layers
from expertmesh.actors.state.tiers.entry import Entry


@dataclass(frozen=True, slots=True)
class LoadedItem:
    """A verified item. nbytes: of what was read for it, packed. speed: told how long a layer took,
    which with packing is most of what a load costs."""

    header: Header
    content: Content
    tier: Tier
    speed: Bandwidth

    @property
    def exact(self) -> bool:
        return self.content.exact

    @property
    def nbytes(self) -> int:
        return self.content.nbytes

    @property
    def raw_bytes(self) -> int:
        return self.content.raw_bytes

    def layer(self, part: int, index: int, out: Tensor) -> None:
        begun = time.perf_counter()
        self.content.layer(part, index, out)
        self.speed.measured(out.nbytes, time.perf_counter() - begun)

    @staticmethod
    def layers(
        items: Sequence["LoadedItem"], part: int, index: int, out: Tensor, rows: Sequence[int]
    ) -> None:
        """As `layer` of items[i] into out[rows[i]], measured as one layer of their average."""
        begun = time.perf_counter()
        write_layers([item.content for item in items], part, index, out, rows)
        seconds = (time.perf_counter() - begun) / len(items)
        items[0].speed.measured(out[0].nbytes, seconds)


@dataclass(slots=True, eq=False)
class Loading:
    """One item on its way, for all fetches that want it: `waiters` are they, with the item's place
    in each. nbytes: about so many. entry: where host memory has it."""

    name: Name
    waiters: list[tuple["StoreFetch", int]]
    nbytes: int
    entry: Entry | None = None
    started: bool = False


@dataclass(slots=True, eq=False)
class StoreFetch:
    """All or nothing, with a deadline. Written under the store's lock; `done` is read without it.

    settle: ends it where the deadline has passed or nobody wants it any more. forgotten: takes note
    of what a fetch still held that was never cancelled.
    """

    names: Sequence[Name]
    exact: bool
    deadline: float
    clock: Clock
    settle: Callable[["StoreFetch", str], None]
    forgotten: Callable[[list[Entry], int], None]
    left: int = 0  # items not here yet
    nbytes: int = 0  # read below the device
    verify_seconds: float = 0.0
    reserved: int = 0  # bytes of host memory that its disk reads may take
    probing: bool = False  # it has asked the disk, and owes the breaker an answer
    reason: str = ""
    held: list[Entry] = field(default_factory=list)
    loaded: list[LoadedItem | None] = field(default_factory=list)
    loading: list[Loading] = field(default_factory=list)
    ended: bool = False

    @property
    def done(self) -> bool:
        """Also past the deadline, should every background thread be stuck or dead."""
        if not self.ended and self.clock() >= self.deadline:
            self.settle(self, "timeout")
        return self.ended

    @property
    def items(self) -> list[Loaded] | None:
        if not self.done or self.reason:
            return None
        return [item for item in self.loaded if item is not None]

    def finish(self, reason: str = "") -> None:
        self.reason = reason
        self.ended = True

    def cancel(self) -> None:
        self.settle(self, "cancelled")

    def __del__(self) -> None:
        # Any thread at any point, perhaps one that has the store's lock: only leaves a note.
        if self.held or self.reserved:
            self.forgotten(self.held, self.reserved)
