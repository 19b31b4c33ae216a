"""Whole answers over HTTP, from real engines that are lost on the way: nothing of it shows.

Attention actors run as plain objects on one event loop, each with all experts in it.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertmesh.actors.attention.actor import AttentionActor
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.deploy import replica_link
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from expertmesh.deploy.ray_client import RayEngineClient
from tests.support.door import parse_events
from tests.support.fake_replica import FakeMesh, Method

BODIES: list[dict[str, Any]] = [
    {"prompt": "hello world", "temperature": 0, "logprobs": 2},
    {"prompt": "a", "temperature": 0.9, "seed": 7, "logprobs": 0, "frequency_penalty": 0.7},
    {"prompt": [5] * 130, "temperature": 0.7, "seed": 1, "n": 2, "repetition_penalty": 1.2},
    {"prompt": "Once upon", "temperature": 0, "echo": True, "logprobs": 1},
    {"prompt": "traced", "temperature": 1.1, "seed": 3, "return_routed_experts": True},
    {"prompt": "biased", "temperature": 0.5, "seed": 4, "logit_bias": {"70": 3.0}, "top_k": 40},
    {"prompt": "bound", "temperature": 0.8, "seed": 5,
     "structured_outputs": {"regex": "([a-f]{2,5}é? )*"}},
]  # fmt: skip
COMMON = {"model": "tiny", "max_tokens": 120, "ignore_eos": True, "return_token_ids": True}


class InProcess:
    """An attention actor behind Ray's calling conventions, and with a process's death."""

    def __init__(self, actor: AttentionActor) -> None:
        self.actor, self.dead = actor, asyncio.Event()
        for name in ("submit", "abort", "health", "stats"):
            setattr(self, name, Method(self._alive(getattr(actor, name))))
        self.stream = Method(self._stream)

    def _alive(self, method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*arguments: Any) -> Any:
            if self.dead.is_set():
                raise ConnectionError("The actor died unexpectedly.")
            return await method(*arguments)

        return call

    async def _stream(self, ingress: str) -> AsyncIterator[Any]:
        async for message in self.actor.stream(ingress):
            if self.dead.is_set():
                raise ConnectionError("The actor died unexpectedly.")
            done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            done.set_result(message)
            yield done

    async def kill(self) -> None:
        self.dead.set()
        await self.actor.leave()


async def started(folder: Path) -> InProcess:
    load = LoadSettings(model=folder, device="cpu", expert_cache_bytes=1 << 22)
    engine = EngineSettings(pages=64, slots=8, step_tokens=64)
    actor = AttentionActor(load, engine, ExchangeSettings())
    await actor.load(with_experts=True)
    await actor.prepare(None, 0)
    await actor.switch(0)
    return InProcess(actor)


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    answer = await http.post("/v1/completions", json=COMMON | body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return {"choices": whole["choices"], "usage": tokens(whole["usage"])}


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """What a stream adds up to."""
    wish = COMMON | body | {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post("/v1/completions", json=wish)
    events = parse_events(answer.text)
    parts = [choice for event in events for choice in event["choices"]]
    return {
        "text": {i: "".join(c["text"] for c in parts if c["index"] == i) for i in (0, 1)},
        "ids": [
            (c["index"], token)
            for i in (0, 1)
            for c in parts
            if c["index"] == i
            for token in c["token_ids"]
        ],
        "ends": sorted(str(c["finish_reason"]) for c in parts if c["finish_reason"]),
        "usage": tokens(events[-1]["usage"]),
    }


def tokens(usage: dict[str, Any]) -> dict[str, Any]:
    """Without what was found in a cache: the same request finds more the second time."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


async def everything(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    return await asyncio.gather(
        *[ask(http, body) for body in BODIES], *[stream(http, body) for body in BODIES]
    )


async def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def test_killed_engines_leave_no_trace_in_any_answer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.05)

    async def main() -> None:
        ready = [await started(checkpoint) for _ in range(5)]
        mesh = FakeMesh(r0=ready.pop(), r1=ready.pop())
        client = RayEngineClient(mesh.read, mesh.find)
        app = build_app(Front(client, describe(checkpoint, load_config(checkpoint), name="tiny")))
        client.start()
        await wait(lambda: len(client._up()) == 2)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            expected = await everything(http)
            answers = asyncio.create_task(everything(http))

            def received() -> int:
                return sum(len(one.ids) for one in client._requests.values())

            moved: set[str] = set()
            for serial, tokens in enumerate((10, 300, 600)):
                await wait(lambda enough=tokens: received() > enough)  # type: ignore[misc]
                # All of them have got on since the last death: else they would be suspects.
                await wait(lambda: not any(one.losses for one in client._requests.values()))
                name = next(iter(mesh.replicas))
                moved |= {one.request.request_id for one in client._links[name].requests}
                victim = mesh.replicas.pop(name)
                await victim.kill()
                mesh.replicas[f"new{serial}"] = ready.pop()
                mesh.publish()
            assert await answers == expected
            assert len(moved) > len(BODIES)
            assert not client._requests and not client._attempts
        await client.stop()
        for replica in mesh.replicas.values():
            await replica.actor.leave()

    asyncio.run(asyncio.wait_for(main(), 170))
