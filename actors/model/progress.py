"""How far a load is: bytes done, bytes in all, bytes per second."""

import logging
import time
from typing import Protocol

_log = logging.getLogger(__name__)


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


def log_progress(label: str) -> LoadProgress:
    """A LoadProgress that writes log lines."""

    def report(done: int, total: int, bytes_per_second: float) -> None:
        percent = 100 * done / total if total else 100.0
        _log.info(
            "%s: %.1f of %.1f MB (%.0f %%), %.1f MB/s",
            label, done / 1e6, total / 1e6, percent, bytes_per_second / 1e6,
        )  # fmt: skip

    return report
