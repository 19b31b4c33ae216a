"""The engine's thread: it parks, wakes, joins, and never leaves a request without an end."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import EngineFailed, TokenOutput
from tests.support.engines import Answer, collect, fake_engine, request
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
