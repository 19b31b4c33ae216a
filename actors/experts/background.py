"""Work beside serving: one thread, one job at a time, behind whoever computes for a request."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# Of two thread priorities the kernel gives the lower about a tenth. Not the lowest there is: this
# thread holds the interpreter's lock now and then, and if it is not scheduled then, the serving
# thread waits for both. Measured on two loaded cores, the longest waits of the serving thread:
# 30 ms with 10, 60 ms with 19, 150 ms in the idle class.
NICENESS = 10
# While a mesh serves, at most this part of the time goes into jobs, one after another.
SHARE = 0.2
LONGEST_PAUSE_S = 1.0


class Background:
    """Runs jobs in the order they come. The thread starts with the first one."""

    def __init__(self, name: str, progress: Callable[[], int] = lambda: 0) -> None:
        """progress: a count that grows while requests are served; jobs are spread out then."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_back)
        self._progress = progress
        self._not_before = 0.0  # on the monotonic clock

    def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Waits behind the jobs that came before."""
        return self._pool.submit(self._paced, job).result()

    def _paced(self, job: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._not_before - time.monotonic()))
        began, before = time.monotonic(), self._progress()
        try:
            return job()
        finally:
            ended = time.monotonic()
            if self._progress() != before:
                pause = (ended - began) * (1 / SHARE - 1)
                self._not_before = ended + min(pause, LONGEST_PAUSE_S)


def _step_back() -> None:
    """This thread only: Linux schedules each thread by itself. Elsewhere nothing changes."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
