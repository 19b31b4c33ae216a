"""A background thread that cannot die unnoticed."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)


class Worker:
    """Calls `step` until it returns False. An exception of one step is logged and the next is made
    (kv-state section 4, row 21: a worker that caught one kind of error died of another, and nobody
    noticed); only what is no Exception, or a hundred failed steps in a row, ends the thread."""

    PATIENCE = 100

    def __init__(self, name: str, step: Callable[[], bool]) -> None:
        self.name = name
        self._step = step
        self._ended = False  # as it should
        self._thread = threading.Thread(target=self._run, name=f"state-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Whether it was started and has ended without being told to."""
        return self._thread.ident is not None and not (self._thread.is_alive() or self._ended)

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while failures < self.PATIENCE:
            try:
                if not self._step():
                    self._ended = True
                    return
                failures = 0
            except Exception:
                failures += 1
                log.exception("state: the %s thread failed", self.name)
            except BaseException:
                log.exception("state: the %s thread ends", self.name)
                return
        log.error("state: the %s thread gives up", self.name)


class Crew:
    """All threads of a store."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    @property
    def dead(self) -> list[str]:
        """Names of those that have ended without being told to."""
        return [worker.name for worker in self._workers if worker.dead]

    def join(self, deadline: float, name: str = "") -> bool:
        """Whether all, or those of that name, have ended by then (time.monotonic)."""
        mine = [worker for worker in self._workers if name in ("", worker.name)]
        ended = [worker.join(deadline - time.monotonic()) for worker in mine]
        return all(ended)
