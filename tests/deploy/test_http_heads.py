"""Heads of any size and kind, and what the connection does after them."""

import asyncio
import socket
import time

import orjson
import pytest

from expertmesh.deploy import http_protocol
from expertmesh.deploy.http_protocol import HEAD_BYTES
from expertmesh.deploy.listener import bind
from tests.support.door import Door, envelope
from tests.support.raw_http import BODY, COMPLETIONS, GOOD, answers, closed, connected, head


class TestHeads:
    def test_head_is_get_without_its_body(self, door: Door) -> None:
        for path in ("/health", "/ready", "/v1/models", "/metrics"):
            response = door.http.head(path)
            assert (response.status_code, response.content) == (200, b"")
        assert door.http.head(COMPLETIONS).status_code == 405
        assert door.http.head("/nope").status_code == 404
        assert door.text("ab", max_tokens=2) == "ab"  # the connection is still in step

    @pytest.mark.parametrize("method", ["OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND"])
    def test_other_methods(self, door: Door, method: str) -> None:
        for path, allowed in ((COMPLETIONS, "POST"), ("/v1/models", "GET")):
            response = door.http.request(method, path)
            assert envelope(response, 405)["code"] == "method_not_allowed"
            assert response.headers["allow"] == allowed

    @pytest.mark.parametrize(
        "line", ["x: " + "y" * (2 * HEAD_BYTES), "y" * (2 * HEAD_BYTES) + ": x",
                 "\r\n".join(f"x-{i}: {'z' * 100}" for i in range(1000))],
    )  # fmt: skip
    def test_a_head_has_a_limit(self, door: Door, line: str) -> None:
        with connected(door.url) as connection:
            data = head(2, line)
            for start in range(0, len(data), 8192):
                try:
                    connection.sendall(data[start : start + 8192])
                except (BrokenPipeError, ConnectionResetError):
                    break  # it has heard enough
            status, _, body = answers(connection)[0]
        assert status == 431 and orjson.loads(body)["error"]["code"] == "headers_too_large"

    def test_a_head_without_an_end(self, door: Door) -> None:
        with connected(door.url) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx: ")
            with pytest.raises(OSError):
                for _ in range(10_000):  # 80 MB
                    connection.sendall(b"y" * 8192)

    def test_a_head_below_the_limit_may_come_in_pieces(self, door: Door) -> None:
        data = head(len(BODY), *[f"x-{i}: {'z' * 1000}" for i in range(55)])
        with connected(door.url) as connection:
            for start in range(0, len(data), 2000):
                connection.sendall(data[start : start + 2000])
                time.sleep(0.001)  # or the kernel makes one piece of them
            connection.sendall(BODY)
            assert answers(connection)[0][0] == 200

    @pytest.mark.parametrize("path", [COMPLETIONS, "/nowhere"])
    def test_what_follows_a_body_has_the_head_s_limit(self, door: Door, path: str) -> None:
        with connected(door.url) as connection:
            connection.sendall(head(None, "transfer-encoding: chunked", path=path) + b"0\r\nx: ")
            with pytest.raises(OSError):
                for _ in range(10_000):  # 80 MB
                    connection.sendall(b"y" * 8192)

    def test_a_body_may_have_more_chunks_than_a_head_has_bytes(self, door: Door) -> None:
        body = orjson.dumps(GOOD | {"user": "u" * 500}) + b" " * HEAD_BYTES
        with connected(door.url) as connection:
            connection.sendall(head(None, "transfer-encoding: chunked"))
            chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
            for start in range(0, len(chunks), 8191):
                connection.sendall(chunks[start : start + 8191])
            connection.sendall(b"0\r\nx: y\r\n\r\n")
            assert answers(connection)[0][0] == 200

    def test_a_long_path_too(self, door: Door) -> None:
        with connected(door.url) as connection:
            connection.sendall(f"GET /{'a' * 2 * HEAD_BYTES} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            assert answers(connection)[0][0] == 431
        assert envelope(door.http.get("/" + "a" * 20_000), 404)

    @pytest.mark.parametrize(
        "data",
        [b"hello\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
         b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
         b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
         b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
         b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
         b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
         b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 3\r\n"
         b"\r\n{}",
         b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"],
    )  # fmt: skip
    def test_what_is_no_http_is_told_in_the_envelope(self, door: Door, data: bytes) -> None:
        with connected(door.url) as connection:
            connection.sendall(data)
            status, headers, body = answers(connection)[0]
            assert status == 400 and headers["connection"] == "close" and closed(connection)
        error = orjson.loads(body)["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_http")

    def test_a_head_has_a_deadline(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
        for data in (b"", b"GET /health HT", head()[:-2]):
            with connected(door.url) as connection:
                connection.sendall(data)
                assert closed(connection)
        with connected(door.url) as connection:  # a request's own time does not count
            connection.sendall(head() + BODY)
            assert answers(connection)[0][0] == 200

    def test_expect_continue(self, door: Door) -> None:
        with connected(door.url) as connection:
            connection.sendall(head(len(BODY), "expect: 100-continue"))
            assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
            connection.sendall(BODY)
            assert answers(connection)[0][0] == 200
        with connected(door.url) as connection:  # refused before the client sends anything
            connection.sendall(head(1 << 30, "expect: 100-continue"))
            assert answers(connection)[0][0] == 413
        with connected(door.url) as connection:
            connection.sendall(head(5, "expect: 100-continue", "content-type: text/plain"))
            assert answers(connection)[0][0] == 415

    def test_pipelined_requests_are_answered_in_order(self, door: Door) -> None:
        bodies = [orjson.dumps(GOOD | {"prompt": f"{i}{i}", "max_tokens": 2}) for i in range(8)]
        with connected(door.url) as connection:
            connection.sendall(b"".join(head(len(body)) + body for body in bodies))
            got = answers(connection, 8)
        texts = [orjson.loads(body)["choices"][0]["text"] for _, _, body in got]
        assert texts == [f"{i}{i}" for i in range(8)]

    @pytest.mark.parametrize(
        "offer", [("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AA"),
                  ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")],
    )  # fmt: skip
    def test_other_protocols_are_passed_over(self, door: Door, offer: tuple[str, ...]) -> None:
        with connected(door.url) as connection:
            for data in (head(len(BODY), *offer) + BODY, head() + BODY):
                connection.sendall(data)
                assert answers(connection)[0][0] == 200
            chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
            connection.sendall(head(None, *offer, "transfer-encoding: chunked") + chunked)
            assert answers(connection)[0][0] == 200
            connection.sendall(head(len(BODY), "connection: close, upgrade", offer[1]) + BODY)
            assert answers(connection)[0][0] == 200 and closed(connection)

    def test_http_1_0(self, door: Door) -> None:
        with connected(door.url) as connection:
            connection.sendall(b"GET /version HTTP/1.0\r\n\r\n")
            assert answers(connection)[0][0] == 200 and closed(connection)

    @pytest.mark.parametrize(
        "path", ["//v1/completions", "/v1//completions", "/V1/completions", "/v1/./completions",
                 "/v1/../v1/completions", "/v1/completions%2f", "/v1/%63ompletions/x", "/%00",
                 "/%ff"],
    )  # fmt: skip
    def test_only_the_paths_that_there_are(self, door: Door, path: str) -> None:
        with connected(door.url) as connection:
            connection.sendall(head(len(BODY), path=path) + BODY)
            assert answers(connection)[0][0] == 404

    def test_answers_are_not_held_back_for_an_ack(self) -> None:
        """Nagle's algorithm and a client's delayed ACK make 40 ms of two small writes."""

        async def nodelay() -> int:
            found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

            class Accepted(asyncio.Protocol):
                def connection_made(self, transport: asyncio.BaseTransport) -> None:
                    accepted = transport.get_extra_info("socket")
                    found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
                    transport.close()

            listener = bind("127.0.0.1", 0)
            server = await asyncio.get_running_loop().create_server(Accepted, sock=listener)
            async with server:
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return await found

        assert asyncio.run(nodelay()) != 0
