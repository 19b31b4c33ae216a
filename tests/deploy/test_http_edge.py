"""What HTTP can do to a server: bodies of all kinds, ids, clients that leave, a drain."""

import gzip
import json
import socket
import threading
import time
import zlib
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest

from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import Limits, ServedModel
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server
from tests.support.raw_http import BODY, COMPLETIONS, GOOD, answers, closed, connected, head

CHAT = "/v1/chat/completions"


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


class TestBodies:
    @pytest.mark.parametrize(
        "kind",
        [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "json",
        ],
    )
    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
    def test_what_is_not_json_is_415(self, door: Door, path: str, kind: str) -> None:
        response = door.http.post(path, content=BODY, headers={"content-type": kind})
        error = envelope(response, 415)
        assert "application/json" in error["message"]
        assert error["code"] == "unsupported_media_type"

    @pytest.mark.parametrize(
        "kind", ["application/json", "Application/JSON; charset=utf-8", "application/json;x=y"]
    )
    def test_json_by_any_spelling(self, door: Door, kind: str) -> None:
        response = door.http.post(COMPLETIONS, content=BODY, headers={"content-type": kind})
        assert response.status_code == 200

    def test_gzip(self, door: Door) -> None:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        response = door.http.post(COMPLETIONS, content=gzip.compress(BODY), headers=headers)
        assert response.json()["choices"][0]["text"] == "ab"

    @pytest.mark.parametrize(
        "data",
        [
            b"", BODY, gzip.compress(BODY)[:-1], gzip.compress(BODY)[:10], zlib.compress(BODY),
            gzip.compress(BODY) + b"x", gzip.compress(BODY) * 2, b"\x1f\x8b" + b"\xff" * 100,
        ],
        ids=range(8),  # gzip writes the time: names made of the data differ between workers
    )  # fmt: skip
    def test_broken_gzip(self, door: Door, data: bytes) -> None:
        headers = {"content-encoding": "gzip"}
        assert envelope(door.http.post(COMPLETIONS, content=data, headers=headers), 400)

    def test_a_bomb_is_not_inflated(self, door: Door) -> None:
        """1 MB is the limit; two hundred times that would come out."""
        packer = zlib.compressobj(9, wbits=31)
        piece = b"a" * (1 << 20)
        bomb = b"".join(packer.compress(piece) for _ in range(200)) + packer.flush()
        assert len(bomb) < 1 << 20
        response = door.http.post(COMPLETIONS, content=bomb, headers={"content-encoding": "gzip"})
        assert envelope(response, 413)["code"] == "request_too_large"

    @pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip", "compress"])
    def test_other_codings_are_415(self, door: Door, coding: str) -> None:
        headers = {"content-encoding": coding}
        assert "gzip" in envelope(
            door.http.post(COMPLETIONS, content=BODY, headers=headers), 415
        )["message"]  # fmt: skip

    @pytest.mark.parametrize(
        ("body", "name"),
        [
            ('{"model":"tiny","prompt":"x","model":"tiny"}', "model"),
            ('{"model":"tiny","prompt":"x","max_tokens":1,"max_tokens":999}', "max_tokens"),
            ('{"model":"tiny","prompt":"x","stream_options":{"a:b":1,"a:b":2}}', "a:b"),
            ('{"model":"tiny","prompt":"x","stop":[{"é":1,"\\u00e9":2}]}', "é"),
        ],
    )
    def test_a_key_has_one_value(self, door: Door, body: str, name: str) -> None:
        error = envelope(door.http.post(COMPLETIONS, content=body.encode()), 400)
        assert error["param"] == name and "twice" in error["message"]

    @pytest.mark.parametrize("prompt", ['a": ":', '\\":{', '":"', "::\\\\", 'x"\\":,"y":'])
    def test_colons_in_text_are_text(self, door: Door, prompt: str) -> None:
        assert door.text(prompt, max_tokens=3) == prompt[:3]

    @pytest.mark.parametrize(
        "body",
        [b"\xef\xbb\xbf" + BODY, BODY.decode().encode("utf-16"), BODY + b"{}", BODY + b"\0",
         b'{"model":"tiny","prompt":"\xff"}', b'{"model":"tiny","prompt":"\\ud800"}',
         b'{"model":"tiny","prompt":"a\nb"}', b"{'model':'tiny'}", b'{"model":"tiny",}'],
    )  # fmt: skip
    def test_what_only_looks_like_json(self, door: Door, body: bytes) -> None:
        assert envelope(door.http.post(COMPLETIONS, content=body), 400)["code"] == "invalid_json"

    def test_a_nul_in_a_prompt_is_a_character(self, door: Door) -> None:
        assert door.text("a\0b", max_tokens=3) == "a\0b"

    def test_chunked(self, door: Door) -> None:
        response = door.http.post(COMPLETIONS, content=iter([BODY[:5], BODY[5:6], BODY[6:]]))
        assert "transfer-encoding" in response.request.headers
        assert response.json()["choices"][0]["text"] == "ab"

    def test_a_large_body_is_told_its_limit(self, door: Door) -> None:
        """The client gets to read the answer although it is still sending."""
        big = b'{"model":"tiny","prompt":"' + b"x" * (20 << 20) + b'"}'
        assert envelope(door.http.post(COMPLETIONS, content=big), 413)
        assert envelope(door.http.post(COMPLETIONS, content=iter([big[:1000], big])), 413)
        assert door.text("ab", max_tokens=2) == "ab"

    def test_a_slow_upload_is_408(self, served: ServedModel) -> None:
        limits = Limits(upload_seconds=0.2)
        front = Front(FakeEngineClient(), replace(served, limits=limits))
        with http_server(build_app(front)) as url, connected(url) as connection:
            connection.sendall(head() + BODY[:10])
            status, headers, body = answers(connection)[0]
            assert status == 408 and orjson.loads(body)["error"]["code"] == "timeout"
            assert headers["connection"] == "close" and closed(connection)
            assert front.traffic.requests == 0


class TestIds:
    def test_one_id_in_header_and_body(self, door: Door) -> None:
        response = door.post(COMPLETIONS, **GOOD)
        assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
        response = door.post(COMPLETIONS, **GOOD, request_id="job-7")
        assert response.json()["id"] == "cmpl-job-7"
        assert response.headers["x-request-id"] == "job-7"
        headers = {"x-request-id": "outer"}
        response = door.http.post(COMPLETIONS, json=GOOD, headers=headers)
        assert response.json()["id"] == "cmpl-outer"
        response = door.http.post(COMPLETIONS, json=GOOD | {"request_id": "x"}, headers=headers)
        assert response.json()["id"] == "cmpl-x" and response.headers["x-request-id"] == "outer"

    def test_errors_have_one(self, door: Door) -> None:
        for response in (door.http.get("/nope"), door.post(COMPLETIONS), door.http.put("/health")):
            assert len(response.headers["x-request-id"]) == 32

    def test_the_engine_never_sees_a_clients_id(self, door: Door, fake: FakeEngineClient) -> None:
        for _ in range(2):
            door.post(COMPLETIONS, **GOOD, request_id="same", n=2)
        ids = [request.request_id for request in fake.requests]
        assert len(set(ids)) == 4 and not any("same" in one for one in ids)


class TestLeaving:
    def test_during_the_upload(self, door: Door, fake: FakeEngineClient) -> None:
        with connected(door.url) as connection:
            connection.sendall(head() + BODY[:10])
            wait_for(lambda: door.http.get("/load").json()["server_load"] == 1)
        wait_for(lambda: door.http.get("/load").json()["server_load"] == 0)
        with connected(door.url) as connection:  # chunked, in the middle of a chunk
            connection.sendall(head(None, "transfer-encoding: chunked") + b"ff\r\n{")
        wait_for(lambda: door.metric("expertmesh_http_requests_in_flight") == 0)
        assert fake.requests == []

    def test_uploads_count_against_the_limit(self, served: ServedModel) -> None:
        front = Front(FakeEngineClient(), replace(served, limits=Limits(requests=2)))
        with http_server(build_app(front)) as url, Door(url) as door:
            with connected(url) as one, connected(url) as two:
                one.sendall(head())
                two.sendall(head())
                wait_for(lambda: front.traffic.requests == 2)
                door.refused(COMPLETIONS, 429, prompt="x")
            wait_for(lambda: front.traffic.requests == 0)
            assert door.text("ab", max_tokens=1) == "a"

    @pytest.mark.parametrize("stream", [False, True])
    def test_before_the_first_token(self, door: Door, fake: FakeEngineClient, stream: bool) -> None:
        fake.seconds = 30.0
        body = orjson.dumps(GOOD | {"stream": stream, "n": 3})
        with connected(door.url) as connection:
            connection.sendall(head(len(body)) + body)
            wait_for(lambda: fake.running == 3)
        wait_for(lambda: fake.running == 0)
        assert len(fake.aborted) == 3

    def test_without_reading(self, door: Door, fake: FakeEngineClient) -> None:
        """A client that stops reading holds its own stream back and nobody else's."""
        body = orjson.dumps(
            GOOD | {"stream": True, "max_tokens": 1000, "n": 16, "logprobs": 20, "ignore_eos": True}
        )
        host, port = door.url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head(len(body)) + body)
            wait_for(lambda: fake.running == 16)
            assert door.text("ab", max_tokens=4) == "abab"
        wait_for(lambda: fake.running == 0)
        wait_for(lambda: door.metric("expertmesh_http_requests_in_flight") == 0)

    def test_a_reader_that_never_reads_is_given_up(
        self, served: ServedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("expertmesh.deploy.openai.response._LAST_WORDS_SECONDS", 0.1)
        client = FakeEngineClient()
        front = Front(client, replace(served, limits=Limits(request_seconds=0.5)))
        body = orjson.dumps(
            GOOD | {"stream": True, "max_tokens": 1000, "n": 16, "logprobs": 20, "ignore_eos": True}
        )
        with http_server(build_app(front)) as url, socket.socket() as connection:
            host, port = url.removeprefix("http://").split(":")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head(len(body)) + body)
            wait_for(lambda: client.running == 16)
            wait_for(lambda: client.running == 0 and front.traffic.requests == 0)


class TestDrain:
    def test_nothing_new_is_taken(self, served: ServedModel) -> None:
        """Also over connections from before; running streams end as they would have."""
        client = FakeEngineClient()
        front = Front(client, served)
        with http_server(build_app(front)) as url, Door(url) as door, Door(url) as other:
            assert other.http.get("/health").headers.get("connection") != "close"
            gate = threading.Event()
            client.seconds = 0.05
            events: list[Any] = []

            def run() -> None:
                events.extend(door.events(COMPLETIONS, prompt="ab", max_tokens=20))
                gate.set()

            thread = threading.Thread(target=run)
            thread.start()
            wait_for(lambda: client.running == 1)
            front.drain()
            for path in (COMPLETIONS, CHAT):
                response = other.post(path, **GOOD)
                assert "stopping" in envelope(response, 503)["message"]
                assert response.headers["connection"] == "close"
                assert response.headers["retry-after"] == "1"
            ready = other.http.get("/ready")
            assert envelope(ready, 503) and ready.headers["connection"] == "close"
            assert other.http.get("/health").status_code == 200
            thread.join(20)
            assert gate.is_set()
            assert events[-1]["choices"][0]["finish_reason"] == "length"
            assert client.running == 0 and client.aborted == []


def test_load_counts_what_is_under_way(door: Door, fake: FakeEngineClient) -> None:
    idle = door.http.get("/load").json()
    engines = {"0": {"running": 0, "waiting": 0}}
    assert idle == {"server_load": 0, "streams": 0, "queued": 0, "engines": engines}
    fake.seconds = 30.0
    with httpx.Client(base_url=door.url, timeout=20, verify=False) as client:
        with connected(door.url) as one, connected(door.url) as two:
            stream = orjson.dumps(GOOD | {"stream": True})
            one.sendall(head(len(stream)) + stream)
            two.sendall(head() + BODY)
            wait_for(lambda: client.get("/load").json()["server_load"] == 2)
            assert client.get("/load").json()["streams"] == 1
        wait_for(lambda: client.get("/load").json() == idle)


def test_the_openapi_document_names_every_route_and_answer(door: Door) -> None:
    document = door.http.get("/openapi.json").json()
    responses = document["paths"][COMPLETIONS]["post"]["responses"]
    assert set(responses) == {
        "200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503", "504",
    }  # fmt: skip
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    text = json.dumps(document)
    for kind in ("schemas", "responses"):
        names = {piece.split('"')[0] for piece in text.split(f"#/components/{kind}/")[1:]}
        assert names <= set(document["components"][kind])
    request = document["components"]["schemas"]["CompletionRequest"]
    nullable = [name for name, field in request["properties"].items()
                if {"type": "null"} in field.get("anyOf", [])]  # fmt: skip
    assert set(nullable) == set(request["properties"]) - {"model", "prompt"}
