"""The processes that a local Ray start brings along, so that none survives it."""

import contextlib
import ctypes
from types import TracebackType
from typing import Self

import psutil

_PR_SET_CHILD_SUBREAPER = 36
EXIT_SECONDS = 5.0


class Children:
    """On leaving, waits for every descendant process to end, and kills those that do not.

    Workers are children of Ray's daemon. When that dies they become orphans; as their subreaper
    this process gets them back, so that none is out of sight.
    """

    def __enter__(self) -> Self:
        with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere orphans are lost
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        me = psutil.Process()
        psutil.wait_procs(me.children(recursive=True), timeout=EXIT_SECONDS)
        for process in me.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(me.children(recursive=True), timeout=EXIT_SECONDS)
