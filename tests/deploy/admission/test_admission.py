"""Turns: granted, waited for, refused, given up; by tasks on one event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from expertmesh.actors.attention.messages import EngineStats, GenerateRequest, SamplingParams
from expertmesh.deploy.admission.admission import MOST_RETRY_SECONDS, Admission, Turn
from expertmesh.deploy.admission.capacity import Capacity
from expertmesh.deploy.auth.keys import ApiKey, hash_key
from expertmesh.deploy.edge_settings import QueueSettings
from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.telemetry import Telemetry


def key(name: str, **limits: Any) -> ApiKey:
    return ApiKey(name=name, hash=hash_key(name), **limits)


def requests(choices: int = 1, priority: int = 0, tokens: int = 10) -> list[GenerateRequest]:
    params = SamplingParams(max_tokens=tokens)
    return [GenerateRequest(f"r{n}", [1, 2, 3], params, priority) for n in range(choices)]


async def settled() -> None:
    """All tasks have gone as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Scene:
    """Requests as tasks that hold their turn until told to end. `order`: who had a turn."""

    def __init__(self, stats: Any = None, period: float = 60.0, **settings: Any) -> None:
        async def none() -> Mapping[str, EngineStats | None]:
            return {}

        queue = QueueSettings(**settings)
        self.telemetry = Telemetry("tiny", lambda: 0, lambda: True)
        capacity = Capacity(queue.running, stats or none, period)
        self.admission = Admission(queue, capacity, self.telemetry)
        self.telemetry.watch_queue(lambda: self.admission.waiting)
        self.order: list[str] = []
        self.turns: dict[str, Turn] = {}
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, of: ApiKey | None = None, **wish: Any) -> None:
        """A request, as far as it gets by itself."""
        self._ends[name] = asyncio.Event()

        async def run() -> None:
            async with self.admission.turn(of, requests(**wish), lambda: 7) as turn:
                self.order.append(name)
                self.turns[name] = turn
                await self._ends[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await settled()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
            await self.tasks[name]
        await settled()

    async def go(self, name: str) -> None:
        """The client goes away."""
        self.tasks[name].cancel()
        await settled()

    async def refusal(self, name: str) -> ApiError:
        with pytest.raises(ApiError) as raised:
            await self.tasks[name]
        return raised.value

    def metric(self, name: str, **labels: str) -> float:
        self.telemetry.look({}, None)
        value = self.telemetry.registry.get_sample_value(
            f"expertmesh_{name}", {"model_name": "tiny", **labels}
        )
        return 0.0 if value is None else value

    def refusals(self, reason: str) -> float:
        return self.metric("admission_refusals_total", reason=reason)


def play(story: Callable[[Scene], Awaitable[None]], **scene: Any) -> None:
    async def main() -> None:
        stage = Scene(**scene)
        await story(stage)
        for task in stage.tasks.values():
            task.cancel()
        await asyncio.gather(*stage.tasks.values(), return_exceptions=True)
        assert (stage.admission.running, stage.admission.waiting) == (0, 0), "nothing is left"

    asyncio.run(main())


def test_as_many_run_as_may_and_the_rest_waits_in_turn() -> None:
    async def story(scene: Scene) -> None:
        for name in "abcd":
            await scene.come(name)
        assert scene.order == ["a", "b"]
        assert (scene.admission.running, scene.admission.waiting) == (2, 2)
        assert scene.metric("admission_queued_requests") == 2
        await scene.end("b")
        assert scene.order == ["a", "b", "c"]
        await scene.end("a", "c", "d")
        assert scene.order == ["a", "b", "c", "d"]
        assert scene.metric("admission_wait_seconds_count") == 4

    play(story, running=2)


def test_choices_count_and_the_last_one_may_exceed() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("three", choices=3)
        await scene.come("hundred", choices=100)
        await scene.come("one")
        assert scene.order == ["three", "hundred"] and scene.admission.running == 103
        await scene.end("hundred")
        assert scene.order[-1] == "one", "3 of 4 run"

    play(story, running=4)


def test_a_reader_that_is_slow_keeps_no_turn() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("two", choices=2)
        await scene.come("next")
        scene.turns["two"].choice_ended()
        await settled()
        assert scene.order == ["two", "next"], "its first choice has ended in the engine"
        scene.turns["two"].choice_ended()
        scene.turns["two"].choice_ended()
        assert scene.admission.running == 1
        await scene.end("two")
        assert scene.admission.running == 1, "not given back twice"

    play(story, running=2)


def test_who_goes_away_leaves_the_queue_at_once() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("a")
        for name in ("b", "c"):
            await scene.come(name)
        await scene.go("b")
        assert scene.admission.waiting == 1
        await scene.end("a")
        assert scene.order == ["a", "c"]
        await scene.go("c")  # while it runs
        assert scene.admission.running == 0

    play(story, running=1)


def test_who_goes_away_in_the_moment_of_its_turn_does_not_keep_it() -> None:
    async def story(scene: Scene) -> None:
        for name in "abcd":
            await scene.come(name)
        scene.turns["a"].choice_ended()  # b has the turn, and has not woken yet
        scene.tasks["b"].cancel()
        await settled()
        assert scene.order == ["a", "c"]
        scene.tasks["d"].cancel()  # d is gone, and has not woken yet
        scene.turns["c"].choice_ended()
        await settled()
        assert (scene.admission.running, scene.admission.waiting) == (0, 0)

    play(story, running=1)


def test_a_full_queue_refuses_with_the_time_it_takes() -> None:
    async def story(scene: Scene) -> None:
        for name in ("a", "b", "c", "d"):
            await scene.come(name)
        error = await scene.refusal("d")
        assert (error.status, error.code) == (429, "queue_full")
        assert error.retry_after is not None and 1 <= error.retry_after <= MOST_RETRY_SECONDS
        assert "2 requests wait already" in error.message
        assert scene.refusals("queue_full") == 1
        await scene.end("a")
        assert scene.order == ["a", "b"]

    play(story, running=1, waiting=2)


def test_nothing_waits_where_nothing_may() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("a")
        await scene.come("b")
        assert (await scene.refusal("b")).code == "queue_full"
        await scene.end("a")
        await scene.come("c")
        assert scene.order == ["a", "c"]

    play(story, running=1, waiting=0)


def test_a_full_queue_takes_from_who_has_most() -> None:
    async def story(scene: Scene) -> None:
        flood, light = key("flood"), key("light")
        for n in range(5):
            await scene.come(f"flood-{n}", flood)
        await scene.come("light", light)
        assert (await scene.refusal("flood-4")).code == "queue_full"
        await scene.end("flood-0", "flood-1")
        assert scene.order == ["flood-0", "flood-1", "light"]

    play(story, running=1, waiting=4)


def test_a_key_that_asks_now_and_then_never_waits_for_a_flood() -> None:
    """Of the 200 that wait at most one starts before each of its requests."""

    async def story(scene: Scene) -> None:
        flood, light = key("flood"), key("light")
        for n in range(200):
            await scene.come(f"flood-{n}", flood)
        for n in range(10):
            for _ in range(5):  # some time goes by
                await scene.end(scene.order[len(scene.order) - 2])
            await scene.come(f"light-{n}", light)
            before = len(scene.order)
            while f"light-{n}" not in scene.order:
                await scene.end(next(name for name in scene.order if not scene.tasks[name].done()))
            assert scene.order.index(f"light-{n}") <= before + 1
            await scene.end(f"light-{n}")

    play(story, running=2)


def test_a_wait_ends() -> None:
    async def story(scene: Scene) -> None:
        await scene.come("a")
        await scene.come("b")
        error = await scene.refusal("b")
        assert (error.status, error.code) == (503, "queue_timeout")
        assert error.retry_after is not None and "0.05 s" in error.message
        assert scene.refusals("timeout") == 1 and scene.admission.waiting == 0

    play(story, running=1, wait_seconds=0.05)


def test_a_server_that_stops_refuses_who_waits_and_who_comes() -> None:
    async def story(scene: Scene) -> None:
        for name in "abc":
            await scene.come(name)
        threading.Thread(target=scene.admission.drain).start()
        for name in "bc":
            error = await scene.refusal(name)
            assert (error.status, error.code) == (503, "service_unavailable")
        await scene.come("d")
        assert (await scene.refusal("d")).status == 503
        assert scene.refusals("draining") == 3
        await scene.end("a")  # what runs may end

    play(story, running=1)


def test_a_stop_before_any_request_or_after_the_last_loop() -> None:
    async def story(scene: Scene) -> None:
        scene.admission.drain()
        await scene.come("a")
        assert (await scene.refusal("a")).status == 503
        stages.append(scene)

    stages: list[Scene] = []
    play(story, running=1)
    stages[0].admission.drain()


def test_limits_of_a_key_hold_from_its_acceptance_to_its_end() -> None:
    async def story(scene: Scene) -> None:
        limited, other = key("a", requests_in_flight=2), key("b")
        for name in ("a1", "a2", "a3"):  # a2 waits for a turn, and is under way
            await scene.come(name, limited)
        error = await scene.refusal("a3")
        assert (error.status, error.code) == (429, "requests_in_flight_exceeded")
        with pytest.raises(ApiError):
            scene.admission.check(limited)
        scene.admission.check(other)
        scene.admission.check(None)
        assert scene.refusals("rate_limit") == 2
        await scene.go("a2")
        scene.admission.check(limited)

    play(story, running=1)


def test_a_key_is_not_more_urgent_than_it_may_be() -> None:
    async def story(scene: Scene) -> None:
        floored = key("a", priority=1)
        await scene.come("first")
        await scene.come("forged", floored, priority=-8)
        await scene.come("plain")
        await scene.end("first", "plain", "forged")
        assert scene.order == ["first", "plain", "forged"]
        assert [request.priority for request in scene.turns["forged"].requests] == [1]

    play(story, running=1)


class Engines:
    """What the engines say of their slots."""

    def __init__(self, *slots: int | None) -> None:
        self.slots = slots
        self.gate: asyncio.Event | None = None
        self.asked = 0

    async def __call__(self) -> dict[str, EngineStats | None]:
        self.asked += 1
        if self.gate is not None:
            await self.gate.wait()
        return {
            str(n): None if slots is None else EngineStats(slots_total=slots)
            for n, slots in enumerate(self.slots)
        }


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_twice_the_slots_of_the_engines_run() -> None:
    engines = Engines(1, None)

    async def story(scene: Scene) -> None:
        for name in "abcde":
            await scene.come(name)
        assert scene.order == ["a", "b"]
        engines.slots = (1, 1)  # the other engine is back, or one more has come
        await eventually(lambda: len(scene.order) == 4)
        await scene.end("a", "b", "c", "d", "e")
        asked = engines.asked
        await asyncio.sleep(0.02)
        assert engines.asked <= asked + 1, "nobody waits: nobody asks"

    play(story, stats=engines, period=0.001)


def test_the_first_requests_wait_until_the_slots_are_known() -> None:
    engines = Engines(1)

    async def story(scene: Scene) -> None:
        engines.gate = asyncio.Event()
        for name in "abc":
            await scene.come(name)
        assert scene.order == [] and scene.admission.waiting == 3
        engines.gate.set()
        await eventually(lambda: scene.order == ["a", "b"])

    play(story, stats=engines)


@pytest.mark.parametrize("slots", [(), (0,), (None,)])
def test_engines_without_slots_are_given_whatever_comes(slots: tuple[int | None, ...]) -> None:
    async def story(scene: Scene) -> None:
        for n in range(50):
            await scene.come(str(n))
        assert len(scene.order) == 50

    play(story, stats=Engines(*slots))


def test_engines_that_can_not_be_asked_hold_nobody_up(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> Mapping[str, EngineStats | None]:
        raise RuntimeError("no statistics")

    async def story(scene: Scene) -> None:
        await scene.come("a")
        assert scene.order == ["a"]

    play(story, stats=broken)
    assert "can not be read" in caplog.text


def test_a_moment_of_silence_does_not_shrink_the_capacity() -> None:
    engines = Engines(4, 4)

    async def main() -> None:
        capacity = Capacity(None, engines)
        await capacity.look()
        assert capacity.limit == 16
        engines.slots = (4,)  # the other one is too busy to answer
        for _ in range(4):
            await capacity.look()
            assert capacity.limit == 16
        await capacity.look()
        assert capacity.limit == 8, "it has really gone"

    asyncio.run(main())
