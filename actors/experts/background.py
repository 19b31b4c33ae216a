"""Work beside serving: one thread, one job at a time, behind whoever computes for a request."""

import contextlib
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# While a mesh serves, at most this part of the time goes into jobs. The shortest pause is for what
# a job costs elsewhere: of a small expert's move the calls between processes cost the most.
SHARE = 0.2
IDLE_AFTER_S = 1.0  # without a step
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


class Background:
    """Runs jobs in the order they come. The thread starts with the first one."""

    def __init__(self, name: str, progress: Callable[[], int] = lambda: 0) -> None:
        """progress: a count that grows while requests are served; jobs are spread out then."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_step_back)
        self._progress = progress
        self._seen, self._grew_at = 0, -math.inf  # the count, and when it was seen to grow
        self._not_before = 0.0  # all times on the monotonic clock

    def run(self, job: Callable[[], T]) -> T:
        """The job's result, or its exception. Waits behind the jobs that came before."""
        return self._pool.submit(self._paced, job).result()

    def _paced(self, job: Callable[[], T]) -> T:
        time.sleep(max(0.0, self._not_before - time.monotonic()))
        began = time.monotonic()
        try:
            return job()
        finally:
            ended = time.monotonic()
            if self._serving(ended):
                pause = (ended - began) * (1 / SHARE - 1)
                self._not_before = ended + min(max(pause, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)

    def _serving(self, now: float) -> bool:
        count = self._progress()
        if count != self._seen:
            self._seen, self._grew_at = count, now
        return now - self._grew_at < IDLE_AFTER_S


def _step_back() -> None:
    """This thread does not take the processor from whoever computes for a request.

    It has no lower priority, though: it holds the interpreter's lock now and then, and while it
    waits for a processor then, so does the serving thread. Longest waits of the serving thread
    measured on two busy cores: 25 ms like this, 64 ms at nice 5, 107 ms at nice 10, 146 ms in the
    idle class.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
