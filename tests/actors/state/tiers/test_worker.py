"""Background threads that can neither die nor hang unnoticed."""

import threading
import time

from expertmesh.actors.state.tiers.worker import Crew, Worker
from tests.support.tiers import until


def test_goes_on_after_any_exception() -> None:
    steps = iter([ValueError("a"), OSError("b"), KeyError("c"), None])

    def step() -> bool:
        error = next(steps)
        if error is not None:
            raise error
        return False

    worker = Worker("test", step)
    worker.start()
    assert worker.join(20.0)
    assert not worker.dead


def test_what_is_no_exception_ends_it_noticed() -> None:
    def step() -> bool:
        raise SystemExit("dies")

    crew = Crew([Worker("one", step), Worker("two", lambda: False)])
    crew.start()
    assert crew.join(time.monotonic() + 20.0)
    assert crew.dead == ["one"]


def test_a_worker_that_only_fails_gives_up_noticed() -> None:
    calls = []

    def step() -> bool:
        calls.append(1)
        raise ValueError("always")

    worker = Worker("test", step)
    worker.start()
    until(lambda: worker.dead)
    assert len(calls) == Worker.PATIENCE


def test_join_says_who_has_not_ended() -> None:
    gate = threading.Event()
    crew = Crew([Worker("quick", lambda: False), Worker("stuck", lambda: not gate.wait(20.0))])
    crew.start()
    assert crew.join(time.monotonic() + 20.0, "quick")
    assert not crew.join(time.monotonic(), "stuck")
    assert crew.dead == []
    gate.set()
    assert crew.join(time.monotonic() + 20.0)


def test_a_step_that_hangs_is_noticed_until_it_ends() -> None:
    gate, begun, now = threading.Event(), threading.Event(), [1000.0]

    def hangs() -> bool:
        begun.set()
        gate.wait(20.0)
        return False

    crew = Crew([Worker("hangs", hangs, lambda: now[0]), Worker("done", lambda: False)])
    assert crew.stuck(0.0) == []
    crew.start()
    assert begun.wait(20.0) and crew.join(time.monotonic() + 20.0, "done")
    now[0] += 30.0
    assert crew.stuck(30.0) == []
    now[0] += 1.0
    assert crew.stuck(30.0) == ["hangs"] and crew.dead == []
    gate.set()
    assert crew.join(time.monotonic() + 20.0)
    assert crew.stuck(0.0) == []


def test_steps_are_timed_one_by_one() -> None:
    now, steps = [0.0], iter(range(5))
    seen: list[bool] = []

    def step() -> bool:
        now[0] += 10.0
        seen.append(worker.stuck(10.0))
        return next(steps, None) is not None

    worker = Worker("test", step, lambda: now[0])
    worker.start()
    assert worker.join(20.0) and seen == [False] * 6
