"""Work beside serving: one thread, one job at a time, behind whoever computes for a request."""

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Enough that a serving thread always goes first. Not the idle class: a thread that is never
# scheduled while it holds the interpreter's lock would hold up the one it should make way for.
NICENESS = 10


class Background:
    """Runs jobs in the order they come. The thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_back)

    def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Waits behind the jobs that came before."""
        return self._pool.submit(job).result()


def _step_back() -> None:
    """This thread only: Linux schedules each thread by itself. Elsewhere nothing changes."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
