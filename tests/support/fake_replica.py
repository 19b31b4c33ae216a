"""Attention actors that are plain objects, and the directory they stand in: no Ray is started."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.attention.messages import EngineStats, GenerateRequest, TokenOutput
from expertmesh.actors.process import Health
from expertmesh.cluster.directory import Directory


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


class FakeReplica:
    """What an attention actor does, without an engine: `say` sends outputs to the ingress.

    Knobs: `health`, `dead` (an Event), `frozen`, `answer` (to every submitted request).
    """

    def __init__(self) -> None:
        self.health_answer = Health(True)
        self.dead = asyncio.Event()
        self.broken = asyncio.Event()  # ends the stream, and only that
        self.frozen = False
        self.answer: Any = None
        self.received: list[GenerateRequest] = []
        self.calls = 0
        self.aborted: list[str] = []
        self.outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.submit, self.abort = Method(self._submit), Method(self._abort)
        self.stream, self.stats = Method(self._stream), Method(self._stats)
        self.health = Method(self._health)
        self.session: Method | None = None  # for a test to fill in

    async def pause(self) -> None:
        """Returns when the process runs; raises when it has died."""
        while self.frozen and not self.dead.is_set():
            await asyncio.sleep(0.005)
        if self.dead.is_set():
            raise ConnectionError("The actor died unexpectedly.\nmore lines")

    async def _submit(self, ingress: str, *message: bytes) -> list[Any]:
        await self.pause()
        self.calls += 1
        requests = msgspec.msgpack.decode(b"".join(message), type=list[GenerateRequest])
        return [self.take(request) for request in requests]

    def take(self, request: GenerateRequest) -> Any:
        self.received.append(request)
        return self.answer

    async def _abort(self, ids: list[str]) -> None:
        await self.pause()
        self.aborted += ids

    async def _health(self, ingress: str) -> Health:
        assert ingress  # else the replica could not tell that this front door is gone
        await self.pause()
        return self.health_answer

    async def _stats(self) -> bytes:
        await self.pause()
        stats = ReplicaStats(engine=EngineStats(running=len(self.received)))
        return msgspec.msgpack.encode(stats)

    async def _stream(self, ingress: str) -> AsyncIterator[Any]:
        self.broken.clear()
        while True:
            waits = [
                asyncio.ensure_future(one)
                for one in (self.outbox.get(), self.dead.wait(), self.broken.wait())
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits[1:]:
                    one.cancel()
                if not waits[0].done():
                    waits[0].cancel()
            if self.dead.is_set():
                raise ConnectionError("The actor died unexpectedly.")
            if self.broken.is_set():
                return
            yield waits[0]

    def say(self, *outputs: TokenOutput) -> None:
        self.outbox.put_nowait(msgspec.msgpack.encode(list(outputs)))


class FakeMesh:
    """A directory of fake replicas. `replicas`: by actor name; `changed` after any change."""

    def __init__(self, **replicas: Any) -> None:
        self.replicas = dict(replicas)
        self.directory = Directory(version=-1)
        self.readable = True
        self._changed = asyncio.Event()
        self.publish()

    def publish(self, serving: bool = True, reason: str = "", **seats: str) -> None:
        """seats: actor name -> seat where it is another than the name."""
        version = self.directory.version + 1
        listed = tuple((seats.get(name, name), name) for name in self.replicas)
        self.directory = Directory(version, listed, serving, reason)
        self._changed.set()
        self._changed = asyncio.Event()

    async def read(self, seen: int) -> Directory:
        if not self.readable:
            raise ConnectionError("the keeper died")
        while self.directory.version == seen:
            await self._changed.wait()
        return self.directory

    def find(self, name: str) -> Any:
        if name not in self.replicas:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return self.replicas[name]
