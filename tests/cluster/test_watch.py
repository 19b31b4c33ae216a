"""The watcher's judgement, with answers that a test makes up in place of Ray's."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.exceptions import RayActorError

from expertmesh.actors.process import Pulse
from expertmesh.cluster import watch as watch_module
from expertmesh.cluster.membership import Bundle, Member, Worker
from expertmesh.cluster.settings import WatchSettings
from expertmesh.cluster.watch import Watch

GOOD = Pulse(3)


@dataclass(eq=False)
class FakeActor:
    """pulse.remote() returns itself; `answer` decides what becomes of the call."""

    answer: Any = GOOD  # a pulse, an exception, or None: no answer
    calls: int = 0
    pulse: Any = field(init=False)

    def __post_init__(self) -> None:
        self.pulse = self

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


class Seen:
    """A watch, and what it has reported."""

    def __init__(self, **actors: FakeActor) -> None:
        self.lost: list[tuple[str, str]] = []
        self.broken: list[tuple[int, str]] = []
        self.watch = Watch(
            WatchSettings(period_s=0.01, silence_s=0.3),
            lambda worker, why: self.lost.append((worker.member.name, why)),
            lambda epoch, why: self.broken.append((epoch, why)),
        )
        self.workers = [
            Worker("expert", name, Member(name, 1, "host", "addr"), actor, Bundle(None, 0), "node")
            for name, actor in actors.items()
        ]
        self.watch.follow(self.workers)

    def until(self, reports: list[Any], limit_s: float = 5.0) -> Any:
        """The one report that comes, and no other after it."""
        end = time.monotonic() + limit_s
        while not reports:
            assert time.monotonic() < end, "nothing noticed"
            time.sleep(0.005)
        time.sleep(0.05)
        assert len(reports) == 1, "reported once"
        return reports[0]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(watch_module, "ray", FakeRay)
    monkeypatch.setattr(watch_module, "HEARSAY_S", 0.15)
    started: list[Seen] = []

    def start(**actors: FakeActor) -> Seen:
        started.append(Seen(**actors))
        return started[-1]

    yield start
    for seen in started:
        seen.watch.stop()


def test_healthy_actors_are_asked_again_and_again(watched: Any) -> None:
    a, b = FakeActor(), FakeActor()
    seen = watched(a=a, b=b)
    end = time.monotonic() + 5
    while min(a.calls, b.calls) < 5:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert seen.lost == seen.broken == []


def test_a_silent_actor_is_named_after_the_limit(watched: Any) -> None:
    began = time.monotonic()
    seen = watched(a=FakeActor(), b=FakeActor(None))
    who, why = seen.until(seen.lost)
    assert who == "b" and "does not answer" in why
    assert time.monotonic() - began > 0.3


def test_after_a_loss_the_others_are_watched_on(watched: Any) -> None:
    a, b = FakeActor(), FakeActor(RayActorError())
    seen = watched(a=a, b=b)
    assert seen.until(seen.lost)[0] == "b"
    calls = a.calls
    a.answer = Pulse(3, stuck="its engine has failed")
    end = time.monotonic() + 5
    while len(seen.lost) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert seen.lost[1] == ("a", "its engine has failed") and a.calls > calls


def test_a_death_explains_the_broken_epoch_that_others_tell_of(watched: Any) -> None:
    witness = FakeActor(Pulse(3, "rank 1: connection closed by peer"))
    victim = FakeActor(None)
    seen = watched(witness=witness, victim=victim)
    time.sleep(0.05)
    assert seen.lost == seen.broken == []
    victim.answer = RayActorError()
    who, why = seen.until(seen.lost)
    assert who == "victim" and "has died" in why and seen.broken == []


def test_a_broken_epoch_that_nothing_explains_is_reported_once(watched: Any) -> None:
    witness = FakeActor(Pulse(3, "rank 1: connection closed by peer"))
    seen = watched(witness=witness, other=FakeActor())
    epoch, why = seen.until(seen.broken)
    assert epoch == 3 and why == "witness: rank 1: connection closed by peer"
    time.sleep(0.3)
    assert len(seen.broken) == 1
    witness.answer = Pulse(4, "again")
    end = time.monotonic() + 5
    while len(seen.broken) < 2:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert seen.broken[1] == (4, "witness: again") and seen.lost == []


def test_who_is_not_followed_any_more_is_not_judged(watched: Any) -> None:
    gone = FakeActor(None)
    seen = watched(a=FakeActor(), gone=gone)
    seen.watch.follow(seen.workers[:1])
    time.sleep(0.5)
    assert seen.lost == []
