"""Limits and fair turns as clients see them, over the scripted client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.deploy.admission.fair_queue import PATIENCE
from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai import response
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door, envelope, joined, parse_events
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server
from tests.support.server_process import wait_for


class Stage:
    """A server whose engine serves only what `let` lets through."""

    def __init__(self, url: str, front: Front, client: FakeEngineClient) -> None:
        self.url, self.front, self.client = url, front, client

    def http(self, key: str = "") -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60, limits=limits)

    def door(self, key: str = "") -> Door:
        door = Door(self.url)
        if key:
            door.http.headers["authorization"] = f"Bearer {key}"
        return door

    def order(self) -> list[str]:
        """First letters of the prompts in the order in which the engine got them."""
        return [chr(request.prompt_ids[0]) for request in self.client.requests]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.002)

    async def queued(self, waiting: int) -> None:
        """Returns when one runs and so many wait."""
        admission = self.front.admission
        await self.until(lambda: (admission.running, admission.waiting) == (1, waiting))


Build = Callable[..., Stage]


@pytest.fixture
def stage(served: ServedModel) -> Iterator[Build]:
    """stage(**sections): built when called, gone afterwards."""
    opened: list[Any] = []

    def build(**sections: Any) -> Stage:
        edge = EdgeSettings.model_validate(sections)
        client = FakeEngineClient()
        info = ServedModel(
            "tiny", "/models/tiny", 1024, served.vocab_size, served.tokenizer, limits=edge.limits()
        )
        front = Front(client, info, edge)
        server = http_server(build_app(front))
        url = server.__enter__()
        opened.append(server)
        return Stage(url, front, client)

    yield build
    for server in opened:
        server.__exit__(None, None, None)


def body(prompt: str, **more: Any) -> dict[str, Any]:
    ids = [ord(letter) for letter in prompt]
    return {"model": "tiny", "prompt": ids, "max_tokens": 2, **more}


def keys_file(path: Path, **limits: dict[str, Any]) -> Path:
    """Keys that are their own names."""
    entries = [{"name": name, "hash": hash_key(name)} | given for name, given in limits.items()]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def hold(client: FakeEngineClient) -> asyncio.Event:
    """Nothing ends before the event is set."""
    client.gate = asyncio.Event()
    return client.gate


def release(stage: Stage) -> None:
    """From the test's thread: the scripted client lives on the server's loop."""
    assert stage.client.gate is not None
    stage.client.gate, gate = None, stage.client.gate
    loop = stage.front.admission._loop
    assert loop is not None
    loop.call_soon_threadsafe(gate.set)


def test_a_tenant_that_floods_does_not_hold_up_another(stage: Build, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys", flood={}, light={})
    here = stage(auth={"keys_file": keys}, queue={"running": 2, "waiting": 300})
    hold(here.client)

    async def main() -> None:
        async with here.http("flood") as flood, here.http("light") as light:
            sent = [
                asyncio.create_task(flood.post("/v1/completions", json=body("f" * 9)))
                for _ in range(200)
            ]
            await here.until(lambda: here.front.admission.waiting == 198)
            first = asyncio.create_task(light.post("/v1/completions", json=body("l" * 9)))
            await here.until(lambda: here.front.admission.waiting == 199)
            release(here)
            assert (await first).status_code == 200
            assert {(await one).status_code for one in sent} == {200}

    asyncio.run(main())
    order = here.order()
    assert len(order) == 201 and order.index("l") <= 3, "two ran, and at most one went before it"
    with here.door("light") as door:
        assert door.metric("expertmesh_admission_wait_seconds_count") == 201


def test_urgent_requests_go_first_and_others_are_not_forgotten(stage: Build) -> None:
    here = stage(queue={"running": 1})
    hold(here.client)
    wishes = [("a", 0), *[("h", -5)] * (PATIENCE + 8), ("l", 5)]

    async def main() -> None:
        async with here.http() as client:
            sent = []
            for count, (prompt, priority) in enumerate(wishes):
                wish = body(prompt, priority=priority)
                sent.append(asyncio.create_task(client.post("/v1/completions", json=wish)))
                await here.queued(count)
            release(here)
            assert {(await one).status_code for one in sent} == {200}

    asyncio.run(main())
    assert "".join(here.order()) == "a" + "h" * PATIENCE + "l" + "h" * 8


def test_a_stream_that_waits_is_kept_alive_and_then_served(stage: Build) -> None:
    here = stage(queue={"running": 1}, http={"keep_alive_seconds": 0.02})
    hold(here.client)

    async def main() -> None:
        async with here.http() as client:
            first = asyncio.create_task(client.post("/v1/completions", json=body("a")))
            await here.queued(0)
            wish = body("bc", stream=True)
            async with client.stream("POST", "/v1/completions", json=wish) as second:
                assert second.status_code == 200
                pieces = second.aiter_text()
                text = ""
                while text.count(": keep-alive\n\n") < 2:
                    text += await anext(pieces)
                assert len(here.client.requests) == 1 and here.front.traffic.streams == 0
                release(here)
                async for piece in pieces:
                    text += piece
            assert joined(parse_events(text)) == "bc"
            await first

    asyncio.run(main())


def test_who_hangs_up_while_waiting_is_forgotten(stage: Build) -> None:
    here = stage(queue={"running": 1})
    hold(here.client)

    async def main() -> None:
        async with here.http() as client:
            first = asyncio.create_task(client.post("/v1/completions", json=body("a")))
            await here.queued(0)
            for stream in (False, True):
                wish = body("b", stream=stream)
                task = asyncio.create_task(client.post("/v1/completions", json=wish))
                await here.queued(1)
                task.cancel()
                await here.queued(0)
            assert here.front.traffic.requests == 1
            release(here)
            assert (await first).status_code == 200

    asyncio.run(main())
    assert here.order() == ["a"], "the engine never heard of the others"


def test_a_reader_that_stands_still_does_not_keep_the_engine(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers between are full; the engine is done, and serves others."""
    monkeypatch.setattr(response, "_LAST_WORDS_SECONDS", 0.0)

    async def main() -> None:
        edge = EdgeSettings.model_validate({"queue": {"running": 1}})
        front = Front(FakeEngineClient(), served, edge)
        app = build_app(front)
        opened, wish = asyncio.Event(), json.dumps(body("a", stream=True, max_tokens=50)).encode()
        messages = [{"type": "http.request", "body": wish, "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            opened.set()
            await asyncio.Event().wait()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "http_version": "1.1",
            "scheme": "http", "server": ("x", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        stalled = asyncio.create_task(app(scope, receive, send))
        await opened.wait()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answer = await client.post("/v1/completions", json=body("b"))
        assert answer.status_code == 200
        assert front.traffic.streams == 1, "the first answer is still on its way"
        stalled.cancel()
        await asyncio.gather(stalled, return_exceptions=True)
        assert (front.admission.running, front.traffic.streams) == (0, 0)

    asyncio.run(main())


def test_a_full_queue_is_429_with_a_time(stage: Build) -> None:
    here = stage(queue={"running": 1, "waiting": 1})
    hold(here.client)

    async def main() -> None:
        async with here.http() as client:
            kept = []
            for count in range(2):
                kept.append(asyncio.create_task(client.post("/v1/completions", json=body("a"))))
                await here.queued(count)
            for stream in (False, True):
                response = await client.post("/v1/completions", json=body("b", stream=stream))
                error = envelope(response, 429)
                assert error["code"] == "queue_full" and error["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
            release(here)
            assert {(await one).status_code for one in kept} == {200}

    asyncio.run(main())
    with here.door() as door:
        assert door.metric("expertmesh_admission_refusals_total") == 2
        assert door.metric("expertmesh_admission_queued_requests") == 0


def test_the_limits_of_keys_reach_the_official_client(stage: Build, tmp_path: Path) -> None:
    keys = keys_file(
        tmp_path / "keys",
        few={"requests_per_minute": 2}, small={"tokens_per_minute": 5}, free={},
    )  # fmt: skip
    here = stage(auth={"keys_file": keys})

    def ask(key: str) -> None:
        with openai.OpenAI(base_url=f"{here.url}/v1", api_key=key, max_retries=0) as client:
            client.completions.create(model="tiny", prompt="abc", max_tokens=4)

    for key, allowed, code in (
        ("few", 2, "requests_per_minute_exceeded"),
        ("small", 1, "tokens_per_minute_exceeded"),
    ):
        for _ in range(allowed):
            ask(key)
        with pytest.raises(openai.RateLimitError) as raised:
            ask(key)
        assert raised.value.code == code and f"'{key}'" in raised.value.message
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 60
    for _ in range(5):
        ask("free")
    assert here.front.admission.running == 0


def test_a_limit_is_told_before_the_body_is_read(stage: Build, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys", few={"requests_per_minute": 1})
    here = stage(auth={"keys_file": keys})
    with here.door("few") as door:
        door.text("a", max_tokens=1)
        response = door.http.post("/v1/completions", content=b"not even JSON")
        assert envelope(response, 429)["code"] == "requests_per_minute_exceeded"


def test_slow_uploads_are_under_way_too(stage: Build, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys", one={"requests_in_flight": 1}, other={})
    here = stage(auth={"keys_file": keys})
    whole, uploading = json.dumps(body("a")).encode(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield whole[:10]
        await uploading.wait()
        yield whole[10:]

    async def main() -> None:
        async with here.http("one") as client, here.http("other") as other:
            headers = {"content-type": "application/json"}
            slow = asyncio.create_task(
                client.post("/v1/completions", content=slowly(), headers=headers)
            )
            await here.until(lambda: here.front.traffic.requests == 1)
            response = await client.post("/v1/completions", json=body("b"))
            assert envelope(response, 429)["code"] == "requests_in_flight_exceeded"
            assert (await other.post("/v1/completions", json=body("b"))).status_code == 200
            uploading.set()
            assert (await slow).status_code == 200

    asyncio.run(main())


def test_a_key_is_as_urgent_as_it_may_be_in_the_engine_too(stage: Build, tmp_path: Path) -> None:
    keys = keys_file(tmp_path / "keys", floored={"priority": 2}, free={})
    here = stage(auth={"keys_file": keys})
    for key, asked in (("floored", -9), ("floored", 0), ("floored", 7), ("free", -9)):
        with here.door(key) as door:
            door.text("a", priority=asked)
    got: list[GenerateRequest] = here.client.requests
    assert [request.priority for request in got] == [2, 2, 7, -9]


def test_a_server_that_stops_refuses_who_waits(stage: Build) -> None:
    here = stage(queue={"running": 1})
    hold(here.client)

    async def main() -> None:
        async with here.http() as client:
            first = asyncio.create_task(client.post("/v1/completions", json=body("a")))
            await here.queued(0)
            second = asyncio.create_task(client.post("/v1/completions", json=body("b")))
            await here.queued(1)
            here.front.drain()
            refused = await second
            assert envelope(refused, 503)["type"] == "service_unavailable_error"
            assert refused.headers["retry-after"]
            release(here)
            assert (await first).status_code == 200

    asyncio.run(main())
    wait_for(lambda: here.front.traffic.requests == 0, 5)
