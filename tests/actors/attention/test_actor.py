"""The attention actor as a plain object on an event loop: no Ray, experts in the process."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from expertmesh.actors.attention import actor as actor_module
from expertmesh.actors.attention.actor import AttentionActor, ReplicaStats
from expertmesh.actors.attention.messages import (
    GenerateRequest,
    QuotaExceeded,
    SamplingParams,
    TokenOutput,
)
from expertmesh.actors.attention.outbox import Outboxes, stream
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.actors.process import Health
from tests.support.checkpoints import write_checkpoint

LIMIT_S = 0.3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("actor") / "model")


def request(name: str, tokens: int = 5) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=[1, 2, 3], params=params)


def serve(folder: Path, scenario: Callable[[AttentionActor], Awaitable[None]]) -> None:
    """Runs a scenario against a serving actor and takes it down again."""

    async def run() -> None:
        load = LoadSettings(model=folder, device="cpu", expert_cache_bytes=1 << 22)
        engine = EngineSettings(pages=64, slots=4)
        actor = AttentionActor(load, engine, ExchangeSettings(), step_limit_s=LIMIT_S)
        assert await actor.health() == Health(False, "loading")
        (early,) = await actor.submit("door", msgspec.msgpack.encode([request("early")]))
        assert early is not None and early[0] == "failed"
        read = await actor.load(with_experts=True)
        progress = await actor.progress()
        assert progress.done == progress.total == read > 0
        await actor.prepare(None, 0)
        await actor.switch(0)
        try:
            await asyncio.wait_for(scenario(actor), 60)
        finally:
            await actor.leave()

    asyncio.run(run())


async def submit(actor: AttentionActor, ingress: str, *requests: GenerateRequest) -> list[object]:
    return list(await actor.submit(ingress, msgspec.msgpack.encode(list(requests))))


async def until_end(messages: AsyncIterator[bytes], *names: str) -> dict[str, TokenOutput]:
    """Reads until all `names` have ended; their last outputs."""
    ends: dict[str, TokenOutput] = {}
    async for message in messages:
        for output in msgspec.msgpack.decode(message, type=list[TokenOutput]):
            if output.finish_reason is not None:
                ends[output.request_id] = output
        if all(name in ends for name in names):
            return ends
    raise AssertionError(f"the stream ended with {list(ends)}")


def test_each_ingress_gets_its_own_requests(folder: Path) -> None:
    async def scenario(actor: AttentionActor) -> None:
        assert await submit(actor, "a", request("a1"), request("a2")) == [None, None]
        assert await submit(actor, "b", request("b1")) == [None]
        ends = await until_end(actor.stream("a"), "a1", "a2")
        assert set(ends) == {"a1", "a2"}
        assert set(await until_end(actor.stream("b"), "b1")) == {"b1"}
        assert await actor.health() == Health(True)
        stats = msgspec.msgpack.decode(await actor.stats(), type=ReplicaStats)
        assert stats.engine.generation_tokens == 15

    serve(folder, scenario)


def test_refusals_say_which_field(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(request: GenerateRequest) -> None:
        raise QuotaExceeded("there are 3 already", "session_id")

    async def scenario(actor: AttentionActor) -> None:
        answers = await submit(actor, "a", request("x", 50), request("x"), request("y", 10**6))
        kinds = [answer and (answer[0], answer[2]) for answer in answers]  # type: ignore[index]
        assert kinds == [None, ("refused", "request_id"), ("refused", "max_tokens")]
        assert (await until_end(actor.stream("a"), "x"))["x"].finish_reason == "length"
        assert await submit(actor, "a", request("x")) == [None]  # the name is free again
        assert actor._loop is not None
        monkeypatch.setattr(actor._loop.engine, "submit", full)
        quota = ("quota", "there are 3 already", "session_id")
        assert await submit(actor, "a", request("z")) == [quota]

    serve(folder, scenario)


def test_an_ingress_that_goes_silent_loses_its_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_module, "INGRESS_SILENCE_S", 0.2)

    async def scenario(actor: AttentionActor) -> None:
        await actor.health("gone")
        await submit(actor, "gone", request("long", 3000))
        await submit(actor, "quiet", request("other", 20))  # never promised to show signs of life
        frozen = actor.stream("gone")
        await anext(frozen)
        await asyncio.sleep(0.3)
        await actor.health()
        ends = await until_end(actor.stream("quiet"), "other")
        assert ends["other"].finish_reason == "length"
        while (
            stats := msgspec.msgpack.decode(await actor.stats(), type=ReplicaStats)
        ).engine.running:
            await asyncio.sleep(0.01)
        assert stats.engine.finished_abort == 1
        # It was only frozen. The end of its stream tells it so, and with a new one it is served.
        async with asyncio.timeout(10):
            assert [message async for message in frozen] == []
            assert await actor.health("gone") == Health(True)
            assert await submit(actor, "gone", request("again")) == [None]
            assert set(await until_end(actor.stream("gone"), "again")) == {"again"}

    serve(folder, scenario)


def test_what_a_dropped_ingress_was_still_owed_is_not_kept() -> None:
    async def run() -> None:
        boxes = Outboxes(asyncio.get_running_loop())
        aborted: list[str] = []
        assert boxes.claim("dead", "door")
        waiting = asyncio.ensure_future(anext(stream(boxes, "door", aborted.append), None))
        await asyncio.sleep(0)
        boxes.publish([TokenOutput(request_id="dead", token_ids=[1])])  # on its way when dropped
        boxes.abandon("door", aborted.append)
        assert await asyncio.wait_for(waiting, 10) is None and aborted == ["dead"]
        assert boxes.claim("new", "door")
        boxes.publish([TokenOutput(request_id="new", token_ids=[2])])
        (got,) = msgspec.msgpack.decode(
            await anext(stream(boxes, "door", aborted.append)), type=list[TokenOutput]
        )
        assert got.request_id == "new" and aborted == ["dead"]

    asyncio.run(run())


def test_health_says_loading_until_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, go_on = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Model:
        opened.set()
        assert go_on.wait(20)
        return Model(*args, **options)

    monkeypatch.setattr(actor_module, "Model", slow)

    async def run() -> None:
        load = LoadSettings(model=folder, device="cpu", expert_cache_bytes=1 << 22)
        actor = AttentionActor(load, EngineSettings(pages=64, slots=4), ExchangeSettings())
        loading = asyncio.ensure_future(actor.load())
        assert await asyncio.to_thread(opened.wait, 20)
        assert await actor.health() == Health(False, "loading")
        go_on.set()
        await loading
        assert await actor.health() == Health(False, "in no epoch yet")

    asyncio.run(run())


def test_health_sees_a_stuck_engine_behind_a_live_event_loop(folder: Path) -> None:
    async def scenario(actor: AttentionActor) -> None:
        loop = actor._loop
        assert loop is not None
        release, step = threading.Event(), loop.engine.step

        def stuck() -> list[TokenOutput]:
            release.wait(20)
            return step()

        loop.engine.step = stuck  # type: ignore[method-assign]
        await submit(actor, "a", request("x"))
        await asyncio.sleep(LIMIT_S + 0.3)
        health = await actor.health()
        assert not health.serving and "running for" in health.reason
        assert not health.lost  # its requests are still there
        release.set()
        await until_end(actor.stream("a"), "x")
        assert await actor.health() == Health(True)

    serve(folder, scenario)


def test_a_long_wait_for_an_epoch_is_not_called_serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(actor: AttentionActor) -> None:
        broken = ExchangeError(1, 2, "combine", 3, "connection closed by peer")
        monkeypatch.setattr(actor._elastic, "_broken", broken)
        assert await actor.health() == Health(True)  # the next one is on its way
        monkeypatch.setattr("expertmesh.actors.attention.actor.BROKEN_S", 0.0)
        health = await actor.health()
        assert not health.serving and not health.lost and "connection closed" in health.reason
        monkeypatch.setattr(actor._elastic, "_broken", None)
        assert await actor.health() == Health(True)

    serve(folder, scenario)


def test_an_engine_is_started_once_however_often_it_is_asked_for(folder: Path) -> None:
    async def scenario(actor: AttentionActor) -> None:
        old = actor._loop
        assert old is not None
        old.engine.fail("no more")
        started: list[object] = []
        start = actor._start_engine

        async def counted() -> None:
            started.append(None)
            await start()

        actor._start_engine = counted  # type: ignore[method-assign]
        await asyncio.gather(actor.switch(1), actor.switch(2))
        assert len(started) == 1 and actor._loop is not old and await actor.health() == Health(True)

    serve(folder, scenario)


def test_a_failed_step_ends_requests_and_health(folder: Path) -> None:
    async def scenario(actor: AttentionActor) -> None:
        assert actor._model is not None

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("no more")

        actor._model.forward = broken  # type: ignore[method-assign,assignment]
        await submit(actor, "a", request("x"))
        end = (await until_end(actor.stream("a"), "x"))["x"]
        assert end.finish_reason == "error" and "no more" in (end.error or "") and end.lost
        health = await actor.health()
        assert not health.serving and health.lost and "no more" in health.reason
        (answer,) = await submit(actor, "a", request("y"))
        assert answer is not None and answer[0] == "failed"  # type: ignore[index]
        # The next epoch brings a new engine over the same weights.
        del actor._model.forward
        await actor.switch(1)
        assert await actor.health() == Health(True)
        assert await submit(actor, "a", request("z")) == [None]
        assert (await until_end(actor.stream("a"), "z"))["z"].finish_reason == "length"

    serve(folder, scenario)


def test_a_later_stream_takes_over_what_was_not_sent() -> None:
    async def run() -> None:
        boxes = Outboxes(asyncio.get_running_loop())
        aborted: list[str] = []
        assert boxes.claim("r", "door") and not boxes.claim("r", "other")
        first = stream(boxes, "door", aborted.append)
        boxes.publish([TokenOutput(request_id="r", token_ids=[1])])
        assert b"r" in await anext(first)
        waiting = asyncio.ensure_future(anext(first, None))
        await asyncio.sleep(0)
        second = stream(boxes, "door", aborted.append)
        boxes.publish([TokenOutput(request_id="r", token_ids=[2])])
        boxes.publish([TokenOutput(request_id="stranger", token_ids=[3])])
        got = msgspec.msgpack.decode(await anext(second), type=list[TokenOutput])
        assert [output.token_ids for output in got] == [[2]]
        assert await waiting is None and aborted == []
        await second.aclose()  # the last reader is gone
        assert aborted == ["r"] and boxes.claim("r", "other")

    asyncio.run(run())
