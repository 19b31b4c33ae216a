"""Which snapshot goes when its place is needed (kv-state 3.2).

Least recently used first, where some age faster. Between the turns of a conversation only the
newest snapshot is asked for again: the one before it serves edits and forks alone, once a turn that
leaves a deeper one has begun from it. One that a second turn begins from is where conversations
part, and worth what it was. Rungs of a ladder are kept for edits that may never come.

On traces of coding agents (tests/bench/state_economy.py) that finds more than plain LRU wherever
there are about as many places as agents at work, and as much as recency weighed with depth or more.
"""

from typing import Generic, TypeVar

NameT = TypeVar("NameT")

# How much faster the unlikely ones age.
SUPERSEDED, RUNG = 8, 32


class SnapshotOrder(Generic[NameT]):
    """Names, each with the time of its last use. The clock is the caller's requests: `tick`, after
    `used`, so that what a request begins from counts as older than what it leaves. On the traces
    that finds as much as the other way round, and 2 points more where places are fewest."""

    def __init__(self) -> None:
        self.now = 0
        self._used: dict[NameT, int] = {}
        self._factor: dict[NameT, int] = {}
        self._begun: dict[NameT, int] = {}  # how often a request has begun from it

    def __len__(self) -> int:
        return len(self._used)

    def tick(self) -> None:
        """A request has begun."""
        self.now += 1

    def made(self, name: NameT, *, rung: bool = False) -> None:
        """rung: it is there for edits alone."""
        self._used[name], self._begun[name] = self.now, 0
        self._factor[name] = RUNG if rung else 1

    def used(self, name: NameT, *, deeper: bool) -> None:
        """A request begins from it. deeper: which leaves a snapshot further on."""
        self._used[name] = self.now
        self._begun[name] += 1
        self._factor[name] = SUPERSEDED if deeper and self._begun[name] == 1 else 1

    def gone(self, name: NameT) -> None:
        del self._used[name], self._factor[name], self._begun[name]

    def likely(self, name: NameT) -> bool:
        """Whether it is neither superseded nor an unused rung."""
        return self._factor[name] == 1

    def last_use(self, name: NameT) -> int:
        """By the clock."""
        return self._used[name]

    def victim(self) -> NameT | None:
        """The one of least use. O(names): there are a few dozen."""
        now, factor = self.now, self._factor
        return max(
            self._used, key=lambda name: (now - self._used[name] + 1) * factor[name], default=None
        )
