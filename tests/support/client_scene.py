"""A client over fake replicas, and what a test asks of it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams, TokenOutput
from expertmesh.deploy.ray_client import RayEngineClient
from tests.support.fake_replica import FakeMesh, FakeReplica

HOLD_S, PATIENCE_S, DRAIN_S = 0.6, 0.2, 0.15


def request(name: str, prompt: int = 2, **params: Any) -> GenerateRequest:
    params = {"max_tokens": 9, "temperature": 0.0} | params
    return GenerateRequest(name, [1] * prompt, SamplingParams(**params))


def out(name: str, *ids: int, finish: Any = None, **fields: Any) -> TokenOutput:
    return TokenOutput(request_id=name, token_ids=list(ids), finish_reason=finish, **fields)


async def collect(client: RayEngineClient, name: str, **params: Any) -> list[int]:
    ids: list[int] = []
    async for output in client.generate(request(name, **params)):
        assert output.request_id == name
        ids += output.token_ids
    return ids


class Scene:
    """Two replicas "r0" and "r1", a connected client, and requests under way."""

    def __init__(self, replicas: int = 2) -> None:
        self.mesh = FakeMesh(**{f"r{i}": FakeReplica() for i in range(replicas)})
        self.client = RayEngineClient(
            self.mesh.read, self.mesh.find, hold_s=HOLD_S, patience_s=PATIENCE_S, drain_s=DRAIN_S
        )

    @property
    def replicas(self) -> list[FakeReplica]:
        return list(self.mesh.replicas.values())

    def links(self) -> dict[str, str]:
        return {link.seat: link.state for link in self.client._links.values()}

    async def ask(self, *names: str, **params: Any) -> list["asyncio.Task[list[int]]"]:
        tasks = [asyncio.create_task(collect(self.client, name, **params)) for name in names]
        await until(lambda: all(self.owner(name) is not None for name in names))
        return tasks

    def owner(self, name: str) -> FakeReplica | None:
        """Who received the attempt `name` first."""
        for replica in self.replicas:
            if any(one.request_id == name for one in replica.received):
                return replica
        return None

    def attempt(self, name: str) -> GenerateRequest:
        (found,) = [
            one for replica in self.replicas for one in replica.received if one.request_id == name
        ]
        return found

    def nothing_left(self) -> bool:
        client = self.client
        links = [*client._links.values(), *client._leaving]
        return not (client._requests or client._attempts) and all(
            not link.requests and link.queued == 0 and link.trial is None for link in links
        )


def run(scenario: Callable[[Scene], Coroutine[Any, Any, None]], replicas: int = 2) -> None:
    async def main() -> None:
        scene = Scene(replicas)
        assert scene.client.ready() == (False, "the mesh has not been found yet")
        scene.client.start()
        await until(lambda: list(scene.links().values()) == ["up"] * replicas)
        try:
            await scenario(scene)
            await until(scene.nothing_left)
        finally:
            await scene.client.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.003)
