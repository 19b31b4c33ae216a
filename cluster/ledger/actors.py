"""Rows and busy seconds of the expert actors, by seat: a place in the mesh, whoever sits there."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from expertmesh.cluster.ledger.stats import ActorLoad


@dataclass(slots=True)
class _Seat:
    """read: counters as last read. total: since the seat exists. recent: decayed windows.

    Each is [2, L]: rows, busy seconds.
    """

    read: np.ndarray
    total: np.ndarray
    open: np.ndarray
    recent: np.ndarray


class Seats:
    """Totals only grow, across restarts and epochs too; a removed seat is gone at once."""

    def __init__(self, layers: tuple[int, ...], decay: float) -> None:
        self._layers, self._decay = layers, decay
        self._seats: dict[str, _Seat] = {}

    def add(
        self,
        seat: str,
        rows: Mapping[int, int],
        busy_seconds: Mapping[int, float],
    ) -> None:
        """Counters of the actor in this seat, by absolute layer number.

        A counter that went back belongs to a new actor, which began at zero.
        """
        now = np.array(
            [[source.get(layer, 0) for layer in self._layers] for source in (rows, busy_seconds)],
            dtype=np.float64,
        )
        known = self._seats.get(seat)
        if known is None:
            zero = np.zeros_like(now)
            known = self._seats[seat] = _Seat(zero, zero, zero, zero)
        new = now if (now < known.read).any() else now - known.read
        known.read = now
        known.total, known.open = known.total + new, known.open + new

    def keep(self, seats: Collection[str]) -> None:
        self._seats = {name: seat for name, seat in self._seats.items() if name in seats}

    def close_window(self) -> None:
        for seat in self._seats.values():
            seat.recent = seat.recent * self._decay + seat.open
            seat.open = np.zeros_like(seat.open)

    def _in_order(self) -> list[tuple[str, _Seat]]:
        """expert-2 before expert-10."""
        return sorted(self._seats.items(), key=lambda item: (len(item[0]), item[0]))

    def totals(self) -> list[ActorLoad]:
        return [
            ActorLoad(name, round(seat.total[0].sum()), float(seat.total[1].sum()))
            for name, seat in self._in_order()
        ]

    def recent(self) -> dict[str, np.ndarray]:
        """seat -> float64 [2, L]: rows and busy seconds of the decayed windows."""
        return {name: seat.recent for name, seat in self._in_order()}
