"""A background thread that can neither die nor hang unnoticed."""

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

    def __init__(
        self, name: str, step: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """step: one without work returns after a second or so. clock: seconds."""
        self.name = name
        self._step, self._clock = step, clock
        self._begun: float | None = None  # when the present step did
        self._ended = False  # as it should
        self._thread = threading.Thread(target=self._run, name=f"state-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Whether it was started and has ended without being told to."""
        return self._thread.ident is not None and not (self._thread.is_alive() or self._ended)

    def stuck(self, limit_s: float) -> bool:
        """Whether its present step has been running for longer than that."""
        begun = self._begun
        return begun is not None and self._clock() - begun > limit_s

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._step_until_told()
        finally:
            self._begun = None

    def _step_until_told(self) -> None:
        failures = 0
        while failures < self.PATIENCE:
            self._begun = self._clock()
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

    def stuck(self, limit_s: float) -> list[str]:
        """Names of those whose present step has been running for longer than that."""
        return [worker.name for worker in self._workers if worker.stuck(limit_s)]

    def join(self, deadline: float, name: str = "") -> bool:
        """Whether all, or those of that name, have ended by then (time.monotonic)."""
        mine = [worker for worker in self._workers if name in ("", worker.name)]
        ended = [worker.join(deadline - time.monotonic()) for worker in mine]
        return all(ended)
