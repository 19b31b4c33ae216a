"""Notices a dead, silent or failed actor, and says which one it was."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from expertmesh.cluster.membership import Member
from expertmesh.cluster.settings import WatchSettings

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
            failure = self._failure(calls)
            if failure is not None and not self._stopping.is_set():
                member, reason = failure
                _log.error("%s: %s", member, reason)
                self._on_failure(member, reason)
                return

    def _failure(self, calls: dict[Member, tuple[Any, float]]) -> tuple[Member, str] | None:
        refs = [call for call, _ in calls.values()]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        told: tuple[Member, str] | None = None
        for member, (call, since) in list(calls.items()):
            if call not in answered:
                silent = time.monotonic() - since
                if silent > self._settings.silence_s:
                    return member, f"does not answer (silent for {silent:.1f} s)"
                continue
            del calls[member]
            try:
                healthy, reason = ray.get(call)
            except RayActorError as error:
                return member, f"has died: {first_line(error)}"
            except RayError as error:
                return member, f"health call failed: {first_line(error)}"
            if not healthy:
                told = told or (member, reason)
        # What members say about one another comes after what is known about one itself: the
        # others only see their connections to a dead one close.
        return told


def first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
