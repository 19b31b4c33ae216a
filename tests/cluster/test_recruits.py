"""Filling a seat ends with an answer, whatever happens on the way."""

import queue
from typing import Any

import pytest

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.crew import CrewError, Place
from expertmesh.cluster.events import Event, Joined, NotJoined
from expertmesh.cluster.membership import Bundle, Member, Worker
from expertmesh.cluster.recruits import Recruits
from expertmesh.cluster.settings import ClusterSettings, RecoverySettings

SETTINGS = ClusterSettings(
    load=LoadSettings(model="/nowhere"), recovery=RecoverySettings(pause_s=0.001)
)


class Crew:
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


def fill(crew: Any, attempts: int) -> Event:
    heard: queue.Queue[Event] = queue.Queue()
    recruits = Recruits(SETTINGS, crew, heard.put, lambda seat: {})
    recruits.fill("expert", "expert-1", None, attempts)
    return heard.get(timeout=10.0)


@pytest.mark.parametrize("error", [CrewError("no"), KeyError("node"), AssertionError()])
def test_a_failure_of_any_kind_is_told_and_the_place_given_back(error: Exception) -> None:
    crew = Crew(error)
    event = fill(crew, 1)
    assert isinstance(event, NotJoined) and (event.seat, event.kind) == ("expert-1", "expert")
    assert event.reason and crew.returned == crew.reserved


def test_a_later_attempt_uses_the_same_place() -> None:
    crew = Crew(KeyError("node"), CrewError("no"))
    event = fill(crew, 3)
    assert isinstance(event, Joined) and event.worker.bundle is crew.reserved[0]
    assert len(crew.reserved) == 1 and not crew.returned
