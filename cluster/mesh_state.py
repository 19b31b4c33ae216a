"""What the world is told of a mesh: its state, and the directory of its attention replicas."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from expertmesh.cluster.directory import Directory

TICK_S = 0.25
MOST_WORDS = 500  # characters of causes

# (seat, actor name) of the replicas that take requests, at this moment.
Replicas = Callable[[], tuple[tuple[str, str], ...]]


@dataclass
class Counts:
    """What has happened since the mesh started. recovery_s: of the last recovery."""

    failovers: int = 0
    losses: int = 0
    joins: int = 0
    failed_joins: int = 0
    recovery_s: float = 0.0


@dataclass(frozen=True)
class Status:
    """state: ready | recovering | unserviceable | stopped. since: monotonic, of the trouble."""

    state: str = "ready"
    reason: str = ""
    since: float = field(default_factory=time.monotonic)


class MeshState:
    """Written by the control thread, read by any."""

    def __init__(self, replicas: Replicas, grace_s: float) -> None:
        """grace_s: for so long a recovery counts as serving."""
        self._replicas, self._grace_s = replicas, grace_s
        self._changed = threading.Condition()  # guards _directory
        self._directory = Directory()
        self._cause = ""  # all that the present trouble came of
        self.status = Status()

    def enter(self, state: str, reason: str) -> None:
        """From now on the mesh is in this state; `since` is when its trouble began."""
        old = self.status
        if state == "ready":
            self._cause = ""
        elif state == "recovering" and reason not in self._cause:
            self._cause = f"{self._cause}; {reason}".lstrip("; ")[:MOST_WORDS]
        if (state, reason) != (old.state, old.reason):
            trouble_goes_on = "ready" not in (state, old.state)
            since = old.since if trouble_goes_on else time.monotonic()
            self.status = Status(state, reason, since)
            self.publish()

    def because(self, trouble: str) -> str:
        """The trouble, and what it came of."""
        return f"{trouble} ({self._cause})" if self._cause else trouble

    def publish(self) -> None:
        with self._changed:  # so that nobody overwrites what is newer
            status = self.status
            patient = time.monotonic() - status.since < self._grace_s
            serving = status.state == "ready" or (status.state == "recovering" and patient)
            reason = "" if serving else status.reason
            old = self._directory
            new = Directory(old.version, self._replicas(), serving, reason)
            if new != old:
                self._directory = msgspec.structs.replace(new, version=old.version + 1)
                self._changed.notify_all()

    def directory(self, seen: int, wait_s: float) -> Directory:
        """The directory, as soon as it is another than version `seen`, at the latest after wait_s.

        Judged when asked: a recovery that takes too long turns it red without any event.
        """
        end = time.monotonic() + wait_s
        while True:
            self.publish()
            with self._changed:
                if self._directory.version != seen or time.monotonic() >= end:
                    return self._directory
                self._changed.wait(min(TICK_S, max(0.0, end - time.monotonic())))
