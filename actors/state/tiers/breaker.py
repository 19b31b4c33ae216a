"""When to stop asking something that keeps failing, and how fast it may be written to."""

from collections.abc import Callable

Clock = Callable[[], float]


class Breaker:
    """Opens after `limit` failures in a row: nothing is asked any more for `first_s`, then one
    probe is let through, whose failure doubles the pause up to `most_s` (kv-state 3.8).

    Not synchronised: its owner's lock is held around every call.
    """

    def __init__(
        self, clock: Clock, limit: int = 3, first_s: float = 1.0, most_s: float = 60.0
    ) -> None:
        self._clock = clock
        self._limit, self._first_s, self._most_s = limit, first_s, most_s
        self._failures = 0
        self._pause_s = first_s
        self._until: float | None = None  # open until then; None: closed
        self._probing = False
        self.opened = 0  # how often

    @property
    def open(self) -> bool:
        """Whether the next call would be refused. Changes nothing."""
        return self._until is not None and (self._probing or self._clock() < self._until)

    def allow(self) -> bool:
        """Whether to ask now. Where it was open, the first caller after the pause is the probe,
        which must report how it went."""
        if self.open:
            return False
        self._probing = self._until is not None
        return True

    @property
    def tripped(self) -> bool:
        """Whether it was opened and has not seen a success since."""
        return self._until is not None

    def abandoned(self) -> None:
        """What was allowed has ended without telling anything."""
        self._probing = False

    def succeeded(self) -> None:
        self._failures, self._pause_s = 0, self._first_s
        self._until, self._probing = None, False

    def failed(self) -> None:
        self._failures += 1
        if self._probing:
            self._pause_s = min(2 * self._pause_s, self._most_s)
        elif self._failures < self._limit or self._until is not None:
            return  # not yet, or a straggler that was asked before it opened
        self.trip()

    def trip(self) -> None:
        """Opens it now."""
        self._until, self._probing = self._clock() + self._pause_s, False
        self.opened += 1


class WriteLimit:
    """A token bucket in bytes: at most `per_second` on average and `burst` at once (kv-state 3.6:
    what wears an SSD out is a cache that writes whatever it sees)."""

    def __init__(self, clock: Clock, per_second: float, burst: float) -> None:
        self._clock = clock
        self._per_second, self._burst = per_second, burst
        self._level, self._at = burst, clock()

    def take(self, nbytes: int, owed: bool = False) -> bool:
        """Whether so many bytes may be written now. A full bucket lets anything through once, so
        that nothing is too large for ever; what is owed goes at once, at the others' expense."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_second)
        self._at = now
        if not owed and nbytes > self._level and self._level < self._burst:
            return False
        self._level -= nbytes
        return True
