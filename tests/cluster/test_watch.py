"""The watcher's judgement, with answers that a test makes up in place of Ray's."""

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError

from expertmesh.cluster import watch as watch_module
from expertmesh.cluster.membership import Member
from expertmesh.cluster.settings import WatchSettings
from expertmesh.cluster.watch import Watch

GOOD = (True, "")


@dataclass(eq=False)
class FakeActor:
    """health.remote() returns itself; `answer` decides what becomes of the call."""

    answer: Any = GOOD  # a pair, an exception, or None: no answer
    calls: int = 0
    health: Any = field(init=False)

    def __post_init__(self) -> None:
        self.health = self

    def remote(self) -> "FakeActor":
        self.calls += 1
        return self


class FakeRay:
    @staticmethod
    def wait(calls: list[FakeActor], num_returns: int, timeout: float) -> Any:
        return [c for c in calls if c.answer is not None], []

    @staticmethod
    def get(call: FakeActor) -> Any:
        if isinstance(call.answer, Exception):
            raise call.answer
        return call.answer


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(watch_module, "ray", FakeRay)
    monkeypatch.setattr(watch_module, "HEARSAY_S", 0.15)
    started: list[Watch] = []

    def start(**actors: FakeActor) -> list[tuple[str, str]]:
        failures: list[tuple[str, str]] = []
        members = {Member(name, 1, "host", "addr"): actor for name, actor in actors.items()}
        settings = WatchSettings(period_s=0.01, silence_s=0.3)
        started.append(Watch(members, settings, lambda who, why: failures.append((who.name, why))))
        return failures

    yield start
    for watch in started:
        watch.stop()


def until(failures: list[tuple[str, str]], limit_s: float = 5.0) -> tuple[str, str]:
    end = time.monotonic() + limit_s
    while not failures:
        assert time.monotonic() < end, "nothing noticed"
        time.sleep(0.005)
    time.sleep(0.05)
    assert len(failures) == 1, "one failure ends the watch"
    return failures[0]


def test_healthy_actors_are_asked_again_and_again(watched: Any) -> None:
    a, b = FakeActor(), FakeActor()
    failures = watched(a=a, b=b)
    end = time.monotonic() + 5
    while min(a.calls, b.calls) < 5:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert failures == []


def test_a_silent_actor_is_named_after_the_limit(watched: Any) -> None:
    began = time.monotonic()
    who, why = until(watched(a=FakeActor(), b=FakeActor(None)))
    assert who == "b" and "does not answer" in why
    assert time.monotonic() - began > 0.3


def test_a_dead_actor_is_named_rather_than_the_one_that_lost_its_connection(watched: Any) -> None:
    witness, victim = FakeActor((False, "rank 1: connection closed by peer")), FakeActor(None)
    failures = watched(witness=witness, victim=victim)
    time.sleep(0.05)
    assert failures == []
    victim.answer = RayActorError()
    who, why = until(failures)
    assert who == "victim" and "has died" in why


def test_what_an_actor_says_of_itself_counts_when_nothing_else_comes(watched: Any) -> None:
    assert until(watched(a=FakeActor((False, "stuck")), b=FakeActor())) == ("a", "stuck")
