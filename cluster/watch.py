"""Notices a dead, silent or failed actor, and says which one it was."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from expertmesh.cluster.membership import Member
from expertmesh.cluster.settings import WatchSettings

# Of the last so many answers, the slowest times this is the least silence that counts.
LATENCIES, SLOWER = 64, 4.0
HEARSAY_S = 1.0

_log = logging.getLogger(__name__)


class Watch:
    """A thread that keeps one health call open per actor, until the first one fails.

    A dead process ends its call at once; a stopped one leaves it unanswered; a replica whose
    engine has failed or is stuck answers that it has.
    """

    def __init__(
        self,
        actors: Mapping[Member, Any],
        settings: WatchSettings,
        on_failure: Callable[[Member, str], None],
    ) -> None:
        self._actors, self._settings, self._on_failure = dict(actors), settings, on_failure
        self._stopping = threading.Event()
        self._latencies: deque[float] = deque(maxlen=LATENCIES)
        self._told: tuple[tuple[Member, str], float] | None = None  # and when it was heard
        self._thread = threading.Thread(target=self._main, name="mesh-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _main(self) -> None:
        calls: dict[Member, tuple[Any, float]] = {}
        looked = time.monotonic()
        while not self._stopping.wait(self._settings.period_s):
            now = time.monotonic()
            if now - looked > 2 * self._settings.period_s + 0.25:
                # This thread itself was held up: nobody else's silence can be judged by the clock.
                calls = {member: (call, now) for member, (call, _) in calls.items()}
            looked = now
            for member, actor in self._actors.items():
                if member not in calls:
                    calls[member] = actor.health.remote(), now
            failure = self._failure(calls, now)
            if failure is not None and not self._stopping.is_set():
                member, reason = failure
                _log.error("%s: %s", member, reason)
                self._on_failure(member, reason)
                return

    def _failure(
        self, calls: dict[Member, tuple[Any, float]], now: float
    ) -> tuple[Member, str] | None:
        refs = [call for call, _ in calls.values()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for member, (call, since) in list(calls.items()):
            if call not in answered:
                silent = time.monotonic() - since
                if silent > self._limit():
                    return member, f"does not answer (silent for {silent:.1f} s)"
                continue
            del calls[member]
            self._latencies.append(time.monotonic() - since)
            try:
                healthy, reason = ray.get(call)
            except RayActorError as error:
                return member, f"has died: {first_line(error)}"
            except RayError as error:
                return member, f"health call failed: {first_line(error)}"
            if not healthy and self._told is None:
                self._told = (member, reason), now
        # What a member says waits for what is known of the others: that its connection to a dead
        # one has closed is often heard before Ray knows of the death.
        if self._told is not None and now - self._told[1] >= HEARSAY_S:
            return self._told[0]
        return None

    def _limit(self) -> float:
        """On a machine so busy that everybody answers late, silence means less."""
        return max(self._settings.silence_s, SLOWER * max(self._latencies, default=0.0))


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
