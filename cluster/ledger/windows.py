"""From counters that only grow to what one window has brought. L MoE layers, E experts."""

from dataclasses import dataclass

import numpy as np

from expertmesh.actors.exchange.counting import RoutingSnapshot

# Replicas come and go for as long as a mesh lives; those not heard of longest are forgotten.
MOST_SOURCES = 256


@dataclass(frozen=True, slots=True)
class Window:
    """Plain integer sums: windows of several replicas add up in any order and grouping.

    hits_LE: int64. bad_weights_L, bad_rows_L: rows that were not finite. rows_sent: over all
    layers and expert actors.
    """

    hits_LE: np.ndarray
    bad_weights_L: np.ndarray
    bad_rows_L: np.ndarray
    rows_sent: int = 0

    @classmethod
    def empty(cls, layers: int, experts: int) -> "Window":
        none_L = np.zeros(layers, np.int64)
        return cls(np.zeros((layers, experts), np.int64), none_L, none_L)

    def __add__(self, other: "Window") -> "Window":
        return Window(
            self.hits_LE + other.hits_LE,
            self.bad_weights_L + other.bad_weights_L,
            self.bad_rows_L + other.bad_rows_L,
            self.rows_sent + other.rows_sent,
        )

    def __sub__(self, earlier: "Window") -> "Window":
        return Window(
            self.hits_LE - earlier.hits_LE,
            self.bad_weights_L - earlier.bad_weights_L,
            self.bad_rows_L - earlier.bad_rows_L,
            self.rows_sent - earlier.rows_sent,
        )

    @property
    def hits(self) -> int:
        return int(self.hits_LE.sum())


@dataclass(frozen=True, slots=True)
class _Seen:
    steps: int
    counted: Window


class Sources:
    """What was last read of every replica."""

    def __init__(self, layers: tuple[int, ...], experts: int, top_k: int) -> None:
        self._shape = layers, experts, top_k
        self._empty = Window.empty(len(layers), experts)
        self._seen: dict[str, _Seen] = {}  # least recently heard of first

    def advance(self, snapshot: RoutingSnapshot, rows_sent: int) -> Window:
        """What the replica has counted since its last snapshot; all of it the first time.

        A restarted replica is a new source and begins at zero. Of one source an older snapshot may
        arrive after a newer one; it brings nothing. Raises ValueError for another model's shape.
        """
        if (snapshot.layers, snapshot.experts, snapshot.top_k) != self._shape:
            raise ValueError(
                f"a snapshot of {len(snapshot.layers)} layers x {snapshot.experts} experts, top "
                f"{snapshot.top_k}, for a ledger of {len(self._shape[0])} x {self._shape[1]}, top "
                f"{self._shape[2]}"
            )
        last = self._seen.pop(snapshot.source, None) or _Seen(-1, self._empty)
        if snapshot.steps < last.steps:
            self._seen[snapshot.source] = last
            return self._empty
        now = Window(
            snapshot.hits_LE(),
            np.array(snapshot.bad_weights, np.int64),
            np.array(snapshot.bad_rows, np.int64),
            # Counted by the exchange beside the snapshot, which may have been rebuilt meanwhile.
            max(rows_sent, last.counted.rows_sent),
        )
        self._seen[snapshot.source] = _Seen(snapshot.steps, now)
        while len(self._seen) > MOST_SOURCES:
            del self._seen[next(iter(self._seen))]
        return now - last.counted
