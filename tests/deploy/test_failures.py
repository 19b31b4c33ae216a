"""When things go wrong: the right status, one envelope, streams that say so, nothing left."""

import asyncio
import json
import re
import resource
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from expertmesh.actors.attention.messages import EngineBusy, EngineFailed, RequestRefused
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import Limits, ServedModel
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def wait_for(condition: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def raw(url: str, data: bytes, seconds: float = 5.0) -> bytes:
    """What the server answers to bytes on a socket, read until it has something to say."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        return connection.recv(65536)


def test_unknown_routes_and_methods(door: Door) -> None:
    assert envelope(door.http.get("/nope"), 404)["code"] == "not_found"
    assert envelope(door.http.post("/v1/responses", json={}), 404)["type"] == "not_found_error"
    response = door.http.get(COMPLETIONS)
    assert "GET" in envelope(response, 405)["message"] and response.headers["allow"] == "POST"
    assert envelope(door.http.get("/v1/models/other/name"), 404)["code"] == "model_not_found"
    assert door.refused(CHAT, 404, model="x" * 5000, messages=[{}])["code"] == "model_not_found"


@pytest.mark.parametrize("body", ["", "{", "[]", "5", "null", '"x"', '{"model": NaN}', "\xff"])
def test_bodies_that_are_no_json_object(door: Door, body: str) -> None:
    response = door.http.post(COMPLETIONS, content=body.encode("latin-1"))
    assert envelope(response, 400)["code"] == "invalid_json"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_no_json(door: Door, literal: str) -> None:
    body = f'{{"model":"tiny","prompt":"x","temperature":{literal}}}'
    envelope(door.http.post(COMPLETIONS, content=body), 400)


@pytest.mark.parametrize("depth", [100, 1000, 10_000, 100_000])
def test_deep_nesting(door: Door, fake: FakeEngineClient, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    places = [
        f'{{"model":"tiny","messages":[],"tools":{deep}}}',
        f'{{"model":"tiny","messages":{deep}}}',
        f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],"unknown":{deep}}}',
        '{"model":"tiny","messages":[{"role":"user","content":"x"}],"response_format":'
        f'{{"type":"json_schema","json_schema":{{"schema":{deep}}}}}}}',
    ]
    for body in places:
        start = time.monotonic()
        envelope(door.http.post(CHAT, content=body), 400)
        assert time.monotonic() - start < 1


def test_many_wrong_parts_give_a_small_error(door: Door) -> None:
    parts = [{"type": "text", "text": {"a": 1}}] * 2000
    message = {"role": "user", "content": [{"type": "text", "text": "x" * 5000}, *parts]}
    error = door.refused(CHAT, messages=[message])
    assert error["param"].startswith("messages[0].content[1]")
    error = door.refused(COMPLETIONS, prompt="x", **{"k" * 100_000: 1})
    assert len(json.dumps(error)) < 2000
    error = door.refused(COMPLETIONS, prompt="x", stop=[{"a": "y" * 10_000}] * 50)
    assert error["param"] == "stop[0]"


def test_body_limit_before_reading(door: Door) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "content-length: 209715200\r\n\r\n"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = raw(door.url, head.encode())  # not a byte of the 200 MB is sent
    assert answer.startswith(b"HTTP/1.1 413")
    assert orjson.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "request_too_large"
    chunks = (b'{"model":"tiny","prompt":"', *[b"x" * 65536] * 40, b'"}')  # no content-length
    assert envelope(door.http.post(COMPLETIONS, content=iter(chunks)), 413)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RequestRefused("needs 9 pages, the cache has 8", "max_tokens"), 400),
        (EngineBusy("4096 requests are waiting"), 429),
        (EngineUnavailable("replica 0 died"), 503),
        (EngineFailed("rank 1 is gone"), 503),
        (RuntimeError("a secret inside"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_engine_refusals(
    door: Door, fake: FakeEngineClient, error: Exception, status: int, stream: bool
) -> None:
    fake.refuse = error
    response = door.post(COMPLETIONS, prompt="x", max_tokens=2, stream=stream)
    body = envelope(response, status)
    if status == 400:
        assert body["param"] == "max_tokens"
    if status in (429, 503):
        assert response.headers["retry-after"] == "1"
    assert "secret" not in response.text
    if status == 500:
        assert body["message"] == "internal error"


def test_not_ready_is_503_and_live(door: Door, fake: FakeEngineClient) -> None:
    fake.down = "expert actor 1 died"
    assert "expert actor 1" in envelope(door.http.get("/ready"), 503)["message"]
    assert door.http.get("/health").status_code == 200
    assert "expert actor 1" in door.refused(COMPLETIONS, 503, prompt="x")["message"]
    fake.down = ""
    assert door.http.get("/ready").status_code == 200


def test_failure_inside_a_stream(door: Door, fake: FakeEngineClient) -> None:
    fake.fail_after = 3
    fake.script = lambda request: b"abcdefghi"
    for path, body in (
        (COMPLETIONS, {"prompt": "hello world"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 2}),
    ):
        events = door.events(path, max_tokens=9, ignore_eos=True, **body)
        assert set(events[-1]) == {"error"} and "rank 1" in events[-1]["error"]["message"]
        assert all("error" not in event for event in events[:-1])
        for event in events[:-1]:
            assert all(choice["finish_reason"] is None for choice in event["choices"])
        assert "rank 1" in door.refused(path, 503, max_tokens=9, ignore_eos=True, **body)["message"]


def test_failure_before_the_first_token_has_a_status(door: Door, fake: FakeEngineClient) -> None:
    fake.fail_after = 0
    door.refused(COMPLETIONS, 503, prompt="x", stream=True)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(door: Door, fake: FakeEngineClient, stream: bool) -> None:
    fake.seconds = 0.02
    body = orjson.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 900, "n": 2, "stream": stream}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = door.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        wait_for(lambda: fake.running == 2)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    wait_for(lambda: fake.running == 0)
    assert sorted(fake.aborted) == sorted(request.request_id for request in fake.requests)
    wait_for(lambda: door.metric("expertmesh_http_requests_in_flight") == 0)


def test_keep_alive_comments_while_silent(door: Door, fake: FakeEngineClient) -> None:
    fake.seconds = 0.7  # the server comments every 0.2 s
    response = door.post(COMPLETIONS, prompt="x", max_tokens=2, stream=True)
    text = response.text
    assert text.count(": keep-alive\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n") and len(re.findall("data: {", text)) == 2


def test_too_many_requests(served: ServedModel) -> None:
    """Above the limit the answer is "come back later", at once."""
    client = FakeEngineClient(seconds=0.3)
    limited = replace(served, limits=Limits(requests=3))
    with http_server(build_app(Front(client, limited))) as url, Door(url) as door:
        with ThreadPoolExecutor(3) as threads:
            slow = [threads.submit(door.text, "xy", max_tokens=5) for _ in range(3)]
            wait_for(lambda: client.running == 3)
            response = door.post(COMPLETIONS, prompt="x")
            assert envelope(response, 429)["type"] == "rate_limit_error"
            assert response.headers["retry-after"] == "1"
            assert [one.result() for one in slow] == ["xyxyx"] * 3
        # A client may read the last byte before the server has counted it.
        wait_for(lambda: door.metric("expertmesh_http_requests_in_flight") == 0)
        assert door.text("xy", max_tokens=1) == "x"


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/models/", "/health/"])
def test_a_trailing_slash_is_no_redirect(door: Door, path: str) -> None:
    method = "POST" if "completions" in path else "GET"
    assert envelope(door.http.request(method, path), 404)["code"]


def test_request_ids(door: Door) -> None:
    def header(value: str | None) -> str:
        headers = {} if value is None else {"x-request-id": value}
        return str(door.http.get("/health", headers=headers).headers["x-request-id"])

    assert header("abc-123") == "abc-123"
    minted = {header(None), header(None), header("x" * 300)}
    assert len(minted) == 3
    assert door.http.get("/nope", headers={"x-request-id": "e"}).headers["x-request-id"] == "e"


def test_same_request_id_never_mixes(door: Door, fake: FakeEngineClient) -> None:
    async def flood() -> None:
        async with httpx.AsyncClient(
            base_url=door.url, timeout=60, headers={"x-request-id": "same"}
        ) as client:

            async def one(number: int) -> None:
                prompt = f"prompt {number:04d}."
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 64, "request_id": "same",
                        "stop": ".", "stream": number % 2 == 0}  # fmt: skip
                async with slots:
                    response = await client.post(COMPLETIONS, json=body)
                assert response.headers["x-request-id"] == "same"
                assert "".join(re.findall(r'"text":"(.*?)"', response.text)) == prompt[:-1]

            slots = asyncio.Semaphore(50)
            await asyncio.gather(*[one(number) for number in range(300)])

    asyncio.run(flood())
    assert len({request.request_id for request in fake.requests}) == 300


def test_deadline(served: ServedModel) -> None:
    client = FakeEngineClient(seconds=0.05)
    limits = Limits(request_seconds=0.3)
    with (
        http_server(build_app(Front(client, replace(served, limits=limits)))) as url,
        Door(url) as door,
    ):
        assert door.refused(COMPLETIONS, 504, prompt="x", max_tokens=100)["code"] == "timeout"
        events = door.events(COMPLETIONS, prompt="x", max_tokens=100)
        assert events[-1]["error"]["code"] == "timeout"
        wait_for(lambda: client.running == 0 and len(client.aborted) == 2)


def test_checkpoint_without_a_tokenizer() -> None:
    served = ServedModel("bare", "/models/bare", 256, 320, None)
    with (
        http_server(build_app(Front(FakeEngineClient(), served))) as url,
        Door(url, "bare") as door,
    ):
        answer = door.complete([1, 2, 3], max_tokens=2, logprobs=1)
        choice = answer["choices"][0]
        assert choice["token_ids"] == [1, 2] and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:1", "token_id:2"]
        assert door.complete([1, 2, 3])["usage"]["completion_tokens"] == 16
        assert "tokenizer" in door.refused(COMPLETIONS, prompt="x")["message"]
        message = [{"role": "user", "content": "x"}]
        assert "tokenizer" in door.refused(CHAT, messages=message)["message"]
        assert door.refused(COMPLETIONS, prompt=[1], stop="x")["param"] == "stop"
        assert "tokenizer" in door.refused("/tokenize", prompt="x")["message"]
        door.refused("/detokenize", tokens=[1])
        door.events(COMPLETIONS, prompt=[1], max_tokens=2)
        assert (
            "return_routed_experts"
            in door.refused(COMPLETIONS, prompt=[1], return_routed_experts=True)["param"]
        )


def test_large_requests_do_not_hold_up_the_others(served: ServedModel) -> None:
    """2 MB of text and a million token ids are refused by length while /health stays quick."""
    client = FakeEngineClient()
    with (
        http_server(build_app(Front(client, served))) as url,
        Door(url) as door,
        Door(url) as other,
    ):
        slowest = 0.0
        with ThreadPoolExecutor(2) as threads:
            text = threads.submit(door.post, COMPLETIONS, prompt="many words " * 190_000)
            ids = threads.submit(other.post, COMPLETIONS, prompt=[7] * 1_000_000)
            with Door(url) as pinger:
                while not (text.done() and ids.done()):
                    start = time.monotonic()
                    assert pinger.http.get("/health").status_code == 200
                    slowest = max(slowest, time.monotonic() - start)
            for answer in (text, ids):
                assert envelope(answer.result(), 400)["code"] == "context_length_exceeded"
        assert slowest < 2.0


def test_text_that_can_not_fit_is_not_even_encoded(served: ServedModel) -> None:
    class NeverEncodes:
        def encode(self, text: str) -> list[int]:
            raise AssertionError("encoded")

    strict = replace(served, tokenizer=NeverEncodes(), longest_token=10)  # type: ignore[arg-type]
    with http_server(build_app(Front(FakeEngineClient(), strict))) as url, Door(url) as door:
        error = door.refused(COMPLETIONS, prompt="x" * 20_000)
        assert error["code"] == "context_length_exceeded" and "2000" in error["message"]
        for content in ("x" * 10_000, [{"type": "text", "text": "x" * 5_000}] * 2):
            messages = [{"role": "user", "content": content}] * 2
            error = door.refused(CHAT, messages=messages)
            assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
        error = door.refused(CHAT, messages=[{"role": "user", "content": ""}] * 2_000)
        assert error["code"] == "context_length_exceeded" and "2000 messages" in error["message"]


def test_an_idle_connection_is_kept(door: Door) -> None:
    """uvicorn's default closes after 5 s, and the next request of a pool meets a closing socket."""
    patient = httpx.Limits(keepalive_expiry=60)
    with httpx.Client(base_url=door.url, verify=False, limits=patient) as client:
        first = client.get("/health")
        port = first.extensions["network_stream"].get_extra_info("client_addr")
        time.sleep(5.6)
        again = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        assert again == port


def test_every_route_is_known() -> None:
    """A new route must be added here on purpose: keys and limits are decided per route."""
    app = build_app(Front(FakeEngineClient(), ServedModel("m", "/m", 8, 8, None)))
    paths = {getattr(route, "path", "") for route in app.routes} - {"/openapi.json"}
    assert paths == {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{model_id:path}",
        "/tokenize", "/detokenize", "/health", "/ready", "/load", "/version", "/metrics",
        "/mesh", "/mesh/scale", "/mesh/rebalance", "/mesh/routing", "/mesh/routing/record",
        "/dashboard", "/dashboard/data", "/v1/sessions", "/v1/sessions/{session_id}",
        "/v1/sessions/{session_id}/suspend", "/v1/sessions/{session_id}/resume",
        "/v1/sessions/{session_id}/fork",
    }  # fmt: skip
