"""How far a load is: bytes done, bytes in all, bytes per second."""

import time
from typing import Protocol


class LoadProgress(Protocol):
    """Called at most about once a second and once at the end."""

    def __call__(self, done: int, total: int, bytes_per_second: float) -> None: ...


class LoadMeter:
    """Counts bytes of one load and reports them to a LoadProgress."""

    def __init__(
        self, total: int, progress: LoadProgress | None, *, seconds_between: float = 1.0
    ) -> None:
        self._total, self._progress, self._between = total, progress, seconds_between
        self._done = 0
        self._start = self._reported = time.monotonic()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self._done += nbytes
        now = time.monotonic()
        if self._progress is not None and now - self._reported >= self._between:
            self._reported = now
            self._progress(self._done, self._total, self._rate(now))

    def finish(self) -> None:
        """Report the end, whatever the time since the last report."""
        if self._progress is not None:
            self._progress(self._done, self._total, self._rate(time.monotonic()))

    def _rate(self, now: float) -> float:
        return self._done / max(now - self._start, 1e-9)
