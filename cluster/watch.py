"""Notices a dead, silent or stuck worker, and an epoch that has broken with everybody alive."""

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from expertmesh.actors.process import Pulse
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.settings import WatchSettings

# Of the last so many answers, the slowest times this is the least silence that counts.
LATENCIES, SLOWER = 64, 4.0
MOST = 4.0  # times the silence that the settings allow
HEARSAY_S = 0.5

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

_log = logging.getLogger(__name__)

Lost = Callable[[Worker, str], None]
Broken = Callable[[int, str], None]


class Watch:
    """A thread that keeps one `pulse` call open per worker.

    A dead process ends its call at once; a stopped one leaves it unanswered; a stuck one says so.
    Each worker is reported lost once. What a worker says of its epoch waits a moment for what is
    known of the others: that its connection to a dead one has closed is often heard before Ray
    knows of the death, and the loss explains the break.
    """

    def __init__(self, settings: WatchSettings, on_lost: Lost, on_broken: Broken) -> None:
        """on_broken(epoch, reason): an epoch broke and no worker of it was found lost."""
        self._settings, self._on_lost, self._on_broken = settings, on_lost, on_broken
        self._lock = threading.Lock()
        self._workers: list[Worker] = []  # guarded by _lock
        self._calls: dict[Worker, tuple[Any, float]] = {}
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._told: tuple[int, str, float] | None = None  # epoch, reason, when it was heard
        self._epoch = -1  # the newest one that was reported broken
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="mesh-watch", daemon=True)
        self._thread.start()

    def follow(self, workers: Iterable[Worker]) -> None:
        """From now on these workers, and no others."""
        with self._lock:
            self._workers = list(workers)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _main(self) -> None:
        looked = time.monotonic()
        while not self._stopping.wait(self._settings.period_s):
            now = time.monotonic()
            if now - looked > 2 * self._settings.period_s + 0.25:
                # This thread itself was held up: nobody else's silence can be judged by the clock.
                self._calls = {who: (call, now) for who, (call, _) in self._calls.items()}
            looked = now
            try:
                self._look(now)
            except Exception:  # a watch that dies in silence is worse than a missed look
                _log.exception("the watch stumbled")

    def _look(self, now: float) -> None:
        with self._lock:
            workers = list(self._workers)
        self._calls = {who: call for who, call in self._calls.items() if who in workers}
        for worker in workers:
            if worker not in self._calls:
                self._calls[worker] = worker.handle.pulse.remote(), now
        if not self._calls:
            return
        refs = [call for call, _ in self._calls.values()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for worker, (call, since) in list(self._calls.items()):
            reason = self._judge(worker, call, since, call in answered)
            if reason is not None and not self._stopping.is_set():
                self._lose(worker, reason)
        self._judge_epoch(now)

    def _judge(self, worker: Worker, call: Any, since: float, answered: bool) -> str | None:
        """Why the worker is lost; None when it is not."""
        silent = time.monotonic() - since
        if not answered:
            if silent <= self._limit():
                return None
            return f"does not answer (silent for {silent:.1f} s)"
        del self._calls[worker]
        self._latencies.append(silent)
        try:
            pulse: Pulse = ray.get(call)
        except RayActorError as error:
            return f"has died: {first_line(error)}"
        except RayError as error:
            return f"did not answer: {first_line(error)}"
        if pulse.broken and pulse.epoch > self._epoch and self._told is None:
            self._told = pulse.epoch, f"{worker.member.name}: {pulse.broken}", time.monotonic()
        return pulse.stuck or None

    def _lose(self, worker: Worker, reason: str) -> None:
        _log.error("%s: %s", worker, reason)
        with self._lock:
            self._workers = [one for one in self._workers if one is not worker]
        self._calls.pop(worker, None)
        self._told = None
        self._on_lost(worker, reason)

    def _judge_epoch(self, now: float) -> None:
        if self._told is None or now - self._told[2] < HEARSAY_S:
            return
        epoch, reason, _ = self._told
        self._told, self._epoch = None, epoch
        self._on_broken(epoch, reason)

    def _limit(self) -> float:
        """On a machine so busy that everybody answers late, silence means less; but a limit that
        follows the slowest answers without bound would raise itself."""
        least = self._settings.silence_s
        return min(max(least, SLOWER * max(self._latencies, default=0.0)), MOST * least)


def first_line(error: BaseException) -> str:
    """What happened, for a person: the cause in the actor rather than Ray's report of it."""
    cause = getattr(error, "cause", None)
    text = _COLOURS.sub("", str(cause if isinstance(cause, Exception) else error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
