"""The client over attention actors, against actors that are plain objects: no Ray is started."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
import pytest

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineStats,
    GenerateRequest,
    RequestRefused,
    SamplingParams,
    TokenOutput,
)
from expertmesh.deploy import ray_client
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.openai.telemetry import Telemetry
from expertmesh.deploy.ray_client import RayEngineClient


class Method:
    """`actor.method.remote(...)` for a coroutine function, or a streaming one with options()."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def options(self, **options: Any) -> "Method":
        assert options == {"num_returns": "streaming"}
        return self

    def remote(self, *arguments: Any) -> Any:
        answer = self._function(*arguments)
        return answer if hasattr(answer, "__aiter__") else asyncio.ensure_future(answer)


class Replica:
    """What an attention actor does, without an engine: `say` sends outputs to the ingress."""

    def __init__(self) -> None:
        self.healthy: tuple[bool, str] = (True, "")
        self.dead = asyncio.Event()
        self.frozen = False
        self.answer: Any = None
        self.received: list[GenerateRequest] = []
        self.calls = 0
        self.aborted: list[str] = []
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.submit, self.abort = Method(self._submit), Method(self._abort)
        self.stream, self.stats = Method(self._stream), Method(self._stats)
        self.health = Method(self._health)

    async def _pause(self) -> None:
        if self.dead.is_set():
            raise ConnectionError("The actor died unexpectedly.\nmore lines")
        while self.frozen:
            await asyncio.sleep(0.01)

    async def _submit(self, ingress: str, message: bytes) -> list[Any]:
        await self._pause()
        self.calls += 1
        requests = msgspec.msgpack.decode(message, type=list[GenerateRequest])
        self.received += requests
        return [self.answer] * len(requests)

    async def _abort(self, ids: list[str]) -> None:
        self.aborted += ids

    async def _health(self, ingress: str) -> tuple[bool, str]:
        assert ingress  # else the replica could not tell that this front door is gone
        await self._pause()
        return self.healthy

    async def _stats(self) -> bytes:
        await self._pause()
        stats = ReplicaStats(engine=EngineStats(running=len(self.received)))
        return msgspec.msgpack.encode(stats)

    async def _stream(self, ingress: str) -> AsyncIterator[Any]:
        while True:
            message = asyncio.ensure_future(self._outbox.get())
            died = asyncio.ensure_future(self.dead.wait())
            await asyncio.wait([message, died], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            if not message.done():
                message.cancel()
                raise ConnectionError("The actor died unexpectedly.")
            yield message

    def say(self, *outputs: TokenOutput) -> None:
        self._outbox.put_nowait(msgspec.msgpack.encode(list(outputs)))


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, [1, 2], SamplingParams(max_tokens=9))


def out(name: str, *ids: int, finish: Any = None) -> TokenOutput:
    return TokenOutput(request_id=name, token_ids=list(ids), finish_reason=finish)


async def collect(client: RayEngineClient, name: str) -> list[int]:
    return [token async for output in client.generate(request(name)) for token in output.token_ids]


def run(scenario: Callable[[RayEngineClient, list[Replica]], Coroutine[Any, Any, None]]) -> None:
    """Two replicas, connected; the scenario; stopped."""

    async def main() -> None:
        replicas = [Replica(), Replica()]
        client = RayEngineClient({"r0": lambda: replicas[0], "r1": lambda: replicas[1]})
        assert client.ready() == (False, "r0: not connected yet; r1: not connected yet")
        client.start()
        await until(lambda: not any(link.down for link in client._links))
        try:
            await scenario(client, replicas)
        finally:
            await client.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ray_client, "ANSWER_SECONDS", 0.3)


def test_outputs_reach_their_requests() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        first = asyncio.create_task(collect(client, "a"))
        second = asyncio.create_task(collect(client, "b"))
        await until(lambda: all(replica.received for replica in replicas))  # one each
        owner = {replica.received[0].request_id: replica for replica in replicas}
        owner["a"].say(out("a", 1), out("stranger", 9))
        owner["b"].say(out("b", 5))
        owner["a"].say(out("a", 2, finish="stop"))
        owner["b"].say(out("b", 6, 7, finish="length"))
        assert (await first, await second) == ([1, 2], [5, 6, 7])
        stats = await client.stats()
        assert {name: one and one.running for name, one in stats.items()} == {"r0": 1, "r1": 1}
        assert not replicas[0].aborted and not replicas[1].aborted

    run(scenario)


def test_a_replica_that_is_down_is_seen_in_the_metrics() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        replicas[0].dead.set()
        await until(lambda: bool(client._links[0].down))
        stats = await client.stats()
        assert stats["r0"] is None and stats["r1"] is not None
        lines = Telemetry("m", lambda: 0.0).exposition(stats).decode().splitlines()
        series = [line for line in lines if 'engine="r0"' in line]
        assert len(series) == 1 and series[0].startswith("expertmesh_engine_up{")
        assert series[0].endswith(" 0.0")
        assert any('engine="r1"' in line and line.endswith(" 1.0") for line in lines)

    run(scenario)


def test_requests_of_one_turn_share_a_call() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        tasks = [asyncio.create_task(collect(client, str(n))) for n in range(10)]
        await until(lambda: sum(len(replica.received) for replica in replicas) == 10)
        assert [len(replica.received) for replica in replicas] == [5, 5]
        assert [replica.calls for replica in replicas] == [1, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: sum(len(replica.aborted) for replica in replicas) == 10)

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (("refused", "needs 9 pages", "max_tokens"), RequestRefused),
        (("busy", "full", ""), EngineBusy),
        (("failed", "rank 1 is gone", ""), EngineUnavailable),
    ],
)
def test_refusals_keep_their_kind(answer: Any, error: type[Exception]) -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        for replica in replicas:
            replica.answer = answer
        with pytest.raises(error, match=answer[1]) as caught:
            await collect(client, "a")
        if isinstance(caught.value, RequestRefused):
            assert caught.value.field == "max_tokens"
        assert not any(link.load for link in client._links)

    run(scenario)


def test_a_dead_replica_fails_only_its_own() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        tasks = {name: asyncio.create_task(collect(client, name)) for name in "ab"}
        await until(lambda: all(replica.received for replica in replicas))
        dead, alive = replicas
        dead.dead.set()
        with pytest.raises(EngineUnavailable, match="r0: The actor died unexpectedly"):
            await tasks[dead.received[0].request_id]
        assert client.ready() == (True, "")
        name = alive.received[0].request_id
        alive.say(out(name, 3, finish="stop"))
        assert await tasks[name] == [3]
        later = asyncio.create_task(collect(client, "c"))
        await until(lambda: len(alive.received) == 2)
        alive.say(out("c", 4, finish="stop"))
        assert await later == [4]
        alive.dead.set()
        await until(lambda: not client.ready()[0])
        assert "r0: The actor died" in client.ready()[1] and "r1:" in client.ready()[1]
        with pytest.raises(EngineUnavailable):
            await collect(client, "d")

    run(scenario)


def test_a_silent_replica_counts_as_lost() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        for replica in replicas:
            replica.frozen = True
        with pytest.raises(EngineUnavailable, match="no answer"):
            await collect(client, "a")  # even while it is being submitted
        await until(lambda: not client.ready()[0])
        for replica in replicas:
            replica.frozen = False
        await until(lambda: client.ready()[0])

    run(scenario)


def test_an_unhealthy_replica_is_avoided_and_comes_back() -> None:
    async def scenario(client: RayEngineClient, replicas: list[Replica]) -> None:
        replicas[0].healthy = (False, "expert actor 1 has died")
        await until(lambda: bool(client._links[0].down))
        task = asyncio.create_task(collect(client, "a"))
        await until(lambda: bool(replicas[1].received))
        assert not replicas[0].received
        replicas[1].healthy = (False, "the same")
        with pytest.raises(EngineUnavailable, match="the same"):
            await task
        assert "expert actor 1 has died" in client.ready()[1]
        replicas[0].healthy = (True, "")
        await until(lambda: client.ready()[0])

    run(scenario)
