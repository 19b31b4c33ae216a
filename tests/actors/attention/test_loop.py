"""The engine's thread: it parks, wakes, joins, and never leaves a request without an end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import EngineBusy, EngineFailed, TokenOutput
from tests.support.engines import Answer, collect, fake_engine, finish, request
from tests.support.fake_model import FakeModel


class Box:
    """Collects what a loop publishes."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.calls, self._fail_at = 0, fail_at

    def __call__(self, outputs: list[TokenOutput]) -> None:
        self.calls += 1
        if self.calls == self._fail_at:
            raise OSError("the reader is gone")
        collect(outputs, self.answers)

    def ended(self, count: int) -> bool:
        return sum(a.finish_reason is not None for a in list(self.answers.values())) == count


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.002)


@contextmanager
def running(
    engine: Engine, box: Box, peers_open: Callable[[], bool] = lambda: False
) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine, box, peers_open=peers_open)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


def test_serves_parks_and_serves_again() -> None:
    engine, box = fake_engine(), Box()
    with running(engine, box):
        for round_ in range(3):
            for i in range(4):
                engine.submit(request(f"{round_}-{i}", [i], 5))
            until(lambda n=4 * (round_ + 1): box.ended(n))
            steps = engine.stats().steps
            time.sleep(0.05)
            assert engine.stats().steps == steps  # idle means no step at all
            assert not engine.arrived.is_set()  # and that the thread is parked
    assert all(len(a.token_ids) == 5 for a in box.answers.values())


def test_abort_reaches_a_running_request() -> None:
    engine, box = fake_engine(pages=64), Box()
    with running(engine, box) as loop:
        engine.submit(request("r", [1], 4000))
        until(lambda: "r" in box.answers)
        engine.abort("r")
        until(lambda: box.ended(1))
        assert box.answers["r"].finish_reason == "abort"
        assert loop.failed is None


def test_a_failing_step_reaches_every_reader() -> None:
    engine, box = fake_engine(slots=1, model=FakeModel(fail_at=3)), Box()
    with running(engine, box) as loop:
        for i in range(3):
            engine.submit(request(f"r{i}", [i], 50))
        until(lambda: box.ended(3))
        assert {a.finish_reason for a in box.answers.values()} == {"error"}
        assert "fake exchange broke" in str(loop.failed)
        with pytest.raises(EngineFailed):
            engine.submit(request("late", [1]))


def test_stop_ends_what_is_left() -> None:
    engine, box = fake_engine(pages=64), Box()
    with running(engine, box):
        engine.submit(request("r", [1], 4000))
        until(lambda: "r" in box.answers)
    assert box.answers["r"].finish_reason == "error"
    assert box.answers["r"].error == "the engine was stopped"


def test_a_failing_reader_ends_everything() -> None:
    engine, box = fake_engine(), Box(fail_at=2)
    with running(engine, box) as loop:
        for i in range(3):
            engine.submit(request(f"r{i}", [i], 50))
        until(lambda: box.ended(3))
        assert "the reader is gone" in str(loop.failed)


def test_a_step_in_progress_is_visible_and_stop_gives_up_on_it() -> None:
    release, model = threading.Event(), FakeModel()
    forward = model.forward

    def stuck(*args: object, **kwargs: object) -> object:
        release.wait(20)
        return forward(*args, **kwargs)  # type: ignore[arg-type]

    model.forward = stuck  # type: ignore[method-assign, assignment]
    engine, box = fake_engine(model=model), Box()
    loop = EngineLoop(engine, box)
    loop.start()
    assert loop.seconds_in_step() == 0.0
    engine.submit(request("r", [1], 1))
    until(lambda: loop.seconds_in_step() > 0.02)
    with pytest.raises(TimeoutError):
        loop.stop(timeout=0.05)
    release.set()
    loop.stop()
    assert box.answers["r"].finish_reason is not None


def test_joins_the_steps_of_peers_without_work() -> None:
    engine, box, waiting = fake_engine(), Box(), [0]

    class Joining:
        def join_step(self) -> None:
            waiting[0] -= 1

    engine.exchange = Joining()  # type: ignore[assignment]
    with running(engine, box, lambda: waiting[0] > 0) as loop:
        time.sleep(0.02)
        assert waiting == [0]
        waiting[0] = 5
        loop.wake()
        until(lambda: waiting == [0])
        engine.submit(request("r", [1], 3))
        until(lambda: box.ended(1))


def test_a_broken_loop_is_not_silent() -> None:
    engine, box, broken = fake_engine(), Box(), [False]

    def peers_open() -> bool:
        if broken[0]:
            raise ValueError("no such peer")
        return False

    with running(engine, box, peers_open) as loop:
        broken[0] = True
        engine.submit(request("r", [1], 1))
        until(lambda: box.ended(1))
        until(lambda: loop.failed is not None)
        with pytest.raises(EngineFailed, match="no such peer"):
            engine.submit(request("late", [1]))


class Held(FakeModel):
    """Its forward waits in call `hold_at`, as an exchange does between two epochs."""

    def __init__(self, hold_at: int) -> None:
        super().__init__()
        self.hold_at, self.entered = hold_at, threading.Event()
        self.go_on, self.gave_up = threading.Event(), False

    def forward(self, *args: Any, **options: Any) -> Tensor:
        if self.calls + 1 == self.hold_at:
            self.entered.set()
            assert self.go_on.wait(20)
            self.hold_at = 0
            if self.gave_up:
                raise RuntimeError("no epoch within 60 s")
        return super().forward(*args, **options)


def test_a_held_step_takes_requests_and_aborts_for_later() -> None:
    model, box = Held(hold_at=5), Box()
    engine = fake_engine(slots=2, model=model, max_waiting=6)
    engine.submit(request("goes-on", [1, 2], 30))
    engine.submit(request("leaves", [3], 30))
    with running(engine, box) as loop:
        assert model.entered.wait(20)
        before = box.calls
        for i in range(6):
            engine.submit(request(f"new{i}", [i], 4))
        with pytest.raises(EngineBusy, match="6 requests are waiting"):
            engine.submit(request("one-too-many", [1], 4))
        for name in ("leaves", "new3", "nobody"):
            engine.abort(name)
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.failed) == (2, 6, None)
        first = loop.seconds_in_step()
        time.sleep(0.05)
        assert loop.seconds_in_step() > first > 0
        assert (model.calls, box.calls) == (4, before)  # no other step, nothing sent
        model.go_on.set()
        until(lambda: box.ended(8))
        assert loop.failed is None
    reasons = {name: answer.finish_reason for name, answer in box.answers.items()}
    assert reasons == {"goes-on": "length", "leaves": "abort", "new3": "abort"} | {
        f"new{i}": "length" for i in (0, 1, 2, 4, 5)
    }
    alone = fake_engine()
    alone.submit(request("goes-on", [1, 2], 30))
    assert box.answers["goes-on"] == finish(alone)["goes-on"]  # no token lost, none twice


def test_a_held_step_that_is_given_up_loses_its_requests_at_once() -> None:
    model, box = Held(hold_at=3), Box()
    engine = fake_engine(model=model)
    with running(engine, box) as loop:
        engine.submit(request("r", [1], 30))
        assert model.entered.wait(20)
        engine.submit(request("waits", [1], 30))
        model.gave_up = True
        model.go_on.set()
        until(lambda: box.ended(2))
        assert all(answer.lost for answer in box.answers.values())
        until(lambda: loop.seconds_in_step() == 0.0)
        # The thread has parked: a new engine over the same model and state can start beside it.
        fresh, again = Engine(model, engine.state, engine.exchange, engine.settings, []), Box()
        with running(fresh, again):
            fresh.submit(request("r", [1], 3))
            until(lambda: again.ended(1))
        assert again.answers["r"].finish_reason == "length"
