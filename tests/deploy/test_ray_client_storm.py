"""Hundreds of requests over three replicas to which everything happens, in an order drawn by seed.

Whatever happens, a request gets exactly its tokens, and nobody computes for a client that left.
"""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams, TokenOutput
from expertmesh.actors.process import Health
from expertmesh.deploy import ray_client, replica_link
from expertmesh.deploy.engine_client import EngineUnavailable, at_once, at_the_end
from expertmesh.deploy.ray_client import RayEngineClient
from tests.support.fake_replica import FakeMesh, FakeReplica

REQUESTS, SEATS, EVENTS = 300, 3, 60


def token(request: GenerateRequest, at: int) -> int:
    """What a model says at position `at` of the answer: it depends on all that came before."""
    return hash((tuple(request.prompt_ids), request.params.seed, at)) % 50_000


class Generating(FakeReplica):
    """Generates by itself, a token of every request per step, as an engine does."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, tuple[GenerateRequest, list[int]]] = {}
        self.held = False
        self.worker = asyncio.create_task(self._work())

    def take(self, request: GenerateRequest) -> Any:
        if len(self.running) >= 60:
            return ("busy", "60 requests are waiting", "")
        assert request.request_id not in self.running
        self.running[request.request_id] = request, list(request.resume_ids)
        return None

    async def _abort(self, ids: list[str]) -> None:
        await super()._abort(ids)
        for name in ids:
            self.running.pop(name, None)

    async def _work(self) -> None:
        while not self.dead.is_set():
            await asyncio.sleep(0.002)
            if not (self.frozen or self.held) and self.running:
                self.say(*[self._step(name) for name in list(self.running)])

    def _step(self, name: str) -> TokenOutput:
        request, ids = self.running[name]
        ids.append(token(request, len(ids)))
        ends = len(ids) == request.params.max_tokens
        if ends:
            del self.running[name]
        return TokenOutput(
            request_id=name, token_ids=ids[-1:], finish_reason="length" if ends else None
        )

    def fail(self) -> None:
        """The engine fails: all its requests are lost, and a new one takes over at once."""
        lost = list(self.running)
        self.running.clear()
        self.say(*[TokenOutput(request_id=n, finish_reason="error", lost=True) for n in lost])

    def hold(self, held: bool) -> None:
        self.held = held
        self.health_answer = Health(not held, "waits for an epoch" if held else "")


class Storm:
    """Draws what happens next. Every seat is filled again a moment after it was emptied."""

    def __init__(self, mesh: FakeMesh, draw: random.Random) -> None:
        self.mesh, self.draw, self.serial = mesh, draw, 0
        self.everybody: list[Generating] = []
        self.leaving: list[Generating] = []
        self.happened: list[str] = []
        for _ in range(SEATS):
            self.add()

    def add(self) -> None:
        self.serial += 1
        self.mesh.replicas[f"r{self.serial}"] = fresh = Generating()
        self.everybody.append(fresh)
        self.mesh.publish()

    def remove(self, name: str) -> Generating:
        replica: Generating = self.mesh.replicas.pop(name)
        self.mesh.publish()
        return replica

    async def event(self) -> None:
        names = list(self.mesh.replicas)
        name = self.draw.choice(names)
        replica: Generating = self.mesh.replicas[name]
        what = self.draw.choice(["die", "freeze", "drain", "fail", "cut", "hold", "blind", "red"])
        self.happened.append(what)
        pause = self.draw.uniform(0.01, 0.12)
        if what == "die":
            replica.dead.set()
            await asyncio.sleep(pause)
            self.remove(name)
            self.add()
        elif what == "freeze":
            replica.frozen = True
            await asyncio.sleep(2 * pause)
            replica.frozen = False
        elif what == "drain":
            self.add()
            self.leaving.append(self.remove(name))
        elif what == "fail":
            replica.fail()
        elif what == "cut":
            replica.broken.set()
        elif what == "hold":
            replica.hold(True)
            await asyncio.sleep(pause)
            replica.hold(False)
        elif what == "blind":
            self.mesh.readable = False
            self.mesh.publish()
            await asyncio.sleep(pause)
            self.mesh.readable = True
        else:
            self.mesh.publish(serving=False, reason="for a moment")
            await asyncio.sleep(pause)
            self.mesh.publish()


async def one(
    client: RayEngineClient, number: int, draw: random.Random, leave_after: int | None
) -> tuple[list[int], list[int]]:
    """(what a client got, what it should have got). leave_after: it goes away after so many."""
    params = SamplingParams(max_tokens=draw.randint(1, 40), temperature=0.0)
    request = GenerateRequest(f"q{number}", [number, draw.randint(0, 9)], params)
    expected = [token(request, at) for at in range(params.max_tokens)]
    pace = draw.choice([at_once, at_the_end, lambda: 0.01])
    got: list[int] = []
    while True:  # what a polite client does with a 503
        try:
            outputs = client.generate(request, pace)
            async for output in outputs:
                assert output.request_id == request.request_id
                got += output.token_ids
                if leave_after is not None and len(got) >= leave_after:
                    await outputs.aclose()  # type: ignore[attr-defined]
                    return got, expected[: len(got)]
            return got, expected
        except EngineUnavailable as error:
            assert not got and "for a moment" in str(error)  # refused, never broken
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_exactly_its_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(replica_link, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(ray_client, "BUSY_SECONDS", 0.01)
    # In one second a request can lose more replicas than in a year.
    monkeypatch.setattr(ray_client, "MOST_LOSSES", 40)
    monkeypatch.setattr(ray_client, "MOST_LOSSES_IN_ALL", 400)

    async def main() -> None:
        draw = random.Random(seed)
        mesh = FakeMesh()
        storm = Storm(mesh, draw)
        client = RayEngineClient(mesh.read, mesh.find, hold_s=20, patience_s=5, drain_s=0.05)
        client.start()
        await until(lambda: client.ready()[0], 5)

        async def clients() -> list[tuple[list[int], list[int]]]:
            tasks = []
            for number in range(REQUESTS):
                leaves = draw.randint(1, 5) if draw.random() < 0.1 else None
                tasks.append(asyncio.create_task(one(client, number, draw, leaves)))
                await asyncio.sleep(draw.expovariate(200))
            return await asyncio.gather(*tasks)

        answers = asyncio.create_task(clients())
        for _ in range(EVENTS):
            await asyncio.gather(storm.event(), asyncio.sleep(draw.uniform(0, 0.05)))
        for number, (got, expected) in enumerate(await answers):
            assert got == expected, (number, got, expected)
        assert len(set(storm.happened)) == 8, storm.happened
        assert not (client._requests or client._attempts)
        # Also whoever was frozen or cut off learns that nobody waits any more.
        alive = [replica for replica in storm.everybody if not replica.dead.is_set()]
        await until(lambda: not any(replica.running for replica in alive), 5)
        await until(lambda: not client._leaving, 5)
        await client.stop()
        for replica in storm.everybody:
            replica.worker.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
