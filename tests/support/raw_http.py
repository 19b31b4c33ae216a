"""Plain sockets that speak HTTP/1.1, for what no client library sends."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import orjson

COMPLETIONS = "/v1/completions"
GOOD = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
BODY = orjson.dumps(GOOD)


@contextmanager
def connected(url: str, seconds: float = 10.0) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        yield connection


def head(length: int | None = len(BODY), *lines: str, path: str = COMPLETIONS) -> bytes:
    sized = [] if length is None else [f"content-length: {length}"]
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *sized, *lines, "", ""]).encode()


def answers(connection: socket.socket, count: int = 1) -> list[tuple[int, dict[str, str], bytes]]:
    """(status, headers, body) of that many answers, which come whole or end the connection."""
    file, out = connection.makefile("rb"), []
    for _ in range(count):
        status = int(file.readline().split()[1])
        headers = {}
        while line := file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        out.append((status, headers, file.read(int(headers.get("content-length", 0)))))
    return out


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
