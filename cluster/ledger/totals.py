"""Sums over processes that come and go which nevertheless never fall, as a counter must not."""

import threading
from collections.abc import Hashable, Mapping

# Processes of which the last reading is kept apart; older ones can not come back.
MOST_SOURCES = 256


class Total:
    """A process that is gone, or does not answer, keeps what it had counted. Thread-safe: front
    doors ask for it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone = 0
        self._last: dict[Hashable, int] = {}  # least recently heard of first

    def update(self, readings: Mapping[Hashable, int]) -> int:
        """Counters of the processes that answered; returns the total. A restarted process must
        come under another key."""
        with self._lock:
            for source, reading in readings.items():
                self._last[source] = max(reading, self._last.pop(source, 0))
            while len(self._last) > MOST_SOURCES:
                self._gone += self._last.pop(next(iter(self._last)))
            return self._gone + sum(self._last.values())
