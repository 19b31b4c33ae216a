"""Filling a seat ends with an answer, whatever happens on the way."""

import queue
from typing import Any

import pytest

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.events import AttemptFailed, Event, Joined, NotJoined
from expertmesh.cluster.membership import Bundle, Member, Worker
from expertmesh.cluster.provisioner import Provisioner
from expertmesh.cluster.settings import ClusterSettings, RecoverySettings
from expertmesh.cluster.worker_pool import Place, WorkerError

SETTINGS = ClusterSettings(
    load=LoadSettings(model="/nowhere"), recovery=RecoverySettings(pause_s=0.001)
)


class ScriptedPool:
    """Starts a worker once all `failures` have happened."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.reserved: list[Bundle] = []
        self.returned: list[Bundle] = []

    def reserve(self, kinds: list[tuple[Any, str]], limit: float) -> list[Place]:
        self.reserved.append(Bundle("a group", 0))
        return [Place(*kinds[0], self.reserved[-1])]

    def start(self, places: list[Place], together: bool) -> list[Worker]:
        if self.failures:
            raise self.failures.pop(0)
        kind, seat, bundle = places[0]
        return [Worker(kind, seat, Member("m", 1, "host", "127.0.0.1"), None, bundle, "node")]

    def load(self, workers: list[Worker], shares: Any) -> None: ...

    def give_back(self, bundle: Bundle) -> bool:
        self.returned.append(bundle)
        return True


def fill(pool: Any, attempts: int) -> Event:
    """What comes of it, after a word about each attempt that failed."""
    heard: queue.Queue[Event] = queue.Queue()
    failures = len(pool.failures)
    provisioner = Provisioner(SETTINGS, pool, heard.put, lambda seat: {})
    provisioner.fill("expert", "expert-1", None, attempts)
    for attempt in range(1, failures + 1):
        event = heard.get(timeout=10.0)
        assert isinstance(event, AttemptFailed) and event.seat == "expert-1"
        assert event.reason.startswith(f"attempt {attempt} of {attempts}: ")
    return heard.get(timeout=10.0)


@pytest.mark.parametrize("error", [WorkerError("no"), KeyError("node"), AssertionError()])
def test_a_failure_of_any_kind_is_told_and_the_place_given_back(error: Exception) -> None:
    pool = ScriptedPool(error)
    event = fill(pool, 1)
    assert isinstance(event, NotJoined) and (event.seat, event.kind) == ("expert-1", "expert")
    assert event.reason and pool.returned == pool.reserved


def test_a_later_attempt_uses_the_same_place() -> None:
    pool = ScriptedPool(KeyError("node"), WorkerError("no"))
    event = fill(pool, 3)
    assert isinstance(event, Joined) and event.worker.bundle is pool.reserved[0]
    assert len(pool.reserved) == 1 and not pool.returned
