"""A thousand streams at once, half of them cut where it hurts; afterwards all is as before."""

import asyncio
import random
import resource
import socket
import struct
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.support.checkpoints import write_checkpoint
from tests.support.door import Door
from tests.support.server_process import wait_for
from tests.support.watched_server import MEGABYTE, WatchedServer, watched_server

STREAMS, WARM_UP, TOKENS = 1000, 200, 24
RSS_GROWTH = 48 * MEGABYTE
PROMPTS = [f"Stream number {number}:" for number in range(12)]
# Where a cut happens: before, in, or right after the request, or after so many bytes of answer.
PLACES = ("connected", "head", "body", "sent", "answer")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedServer]:
    model = write_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", tokenizer=True, num_hidden_layers=3
    )
    # The server starts with the usual limit of a shell and lifts it by itself; so does the test.
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        with watched_server(model) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
            yield server
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def body(number: int) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": PROMPTS[number % len(PROMPTS)], "max_tokens": TOKENS,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip


def request(number: int) -> tuple[bytes, bytes]:
    """(head, body) of a streaming request."""
    data = orjson.dumps(body(number) | {"stream": True, "stream_options": {"include_usage": True}})
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode(), data


async def whole(host: str, port: int, number: int) -> str:
    """The text of a stream that is read to its end."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"".join(request(number)))
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    answer = bytearray()
    while size := int(await reader.readline(), 16):
        answer += await reader.readexactly(size + 2)
        del answer[-2:]
    writer.close()
    blocks = bytes(answer).split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    events = [orjson.loads(block[6:]) for block in blocks[:-2] if block.startswith(b"data: ")]
    assert events[-1]["usage"]["completion_tokens"] == TOKENS
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    return "".join(choice["text"] for choice in choices)


async def cut(host: str, port: int, number: int, place: str, chance: random.Random) -> None:
    """A stream whose client goes, by a close or by a reset."""
    reader, writer = await asyncio.open_connection(host, port)
    head, data = request(number)
    if place == "head":
        writer.write(head[: chance.randrange(len(head))])
    elif place == "body":
        writer.write(head + data[: chance.randrange(len(data))])
    elif place != "connected":
        writer.write(head + data)
    if place == "answer":
        await reader.readexactly(chance.randrange(1, 700))
    else:
        await asyncio.sleep(chance.random() / 2)
    if chance.random() < 0.5:
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.close()


def soak(url: str, streams: int, seed: int) -> list[tuple[int, str]]:
    """(number, text) of the streams that were let live: every second one."""

    async def run() -> list[tuple[int, str]]:
        host, port = url.removeprefix("http://").split(":")
        chance = random.Random(seed)
        alive, dead = [], []
        for number in range(streams):
            if number % 2:
                alive.append(whole(host, int(port), number))
            else:
                place = PLACES[number // 2 % len(PLACES)]
                dead.append(cut(host, int(port), number, place, chance))
        texts, _ = await asyncio.gather(asyncio.gather(*alive), asyncio.gather(*dead))
        return list(zip(range(1, streams, 2), texts, strict=True))

    return asyncio.run(run())


def loads(door: Door) -> tuple[int, int]:
    load = door.http.get("/load").json()
    return load["server_load"], load["streams"]


@pytest.mark.timeout(400)
def test_a_thousand_streams_half_of_them_cut(server: WatchedServer) -> None:
    with Door(server.url) as door:
        expected = [door.complete(**body(i))["choices"][0]["text"] for i in range(len(PROMPTS))]
    soak(server.url, WARM_UP, seed=1)
    server.wait_idle()
    memory, files = server.rss(), server.descriptors()

    for number, text in soak(server.url, STREAMS, seed=2):
        assert text == expected[number % len(PROMPTS)], number

    server.wait_idle()
    wait_for(lambda: server.descriptors() <= files + 2, 30, lambda: str(server.descriptors()))
    assert server.rss() - memory < RSS_GROWTH
    with Door(server.url) as door:
        assert door.complete(**body(0))["choices"][0]["text"] == expected[0]
        # The last byte of an answer is there before the front door has counted it out.
        wait_for(lambda: loads(door) == (0, 0), 10, lambda: str(loads(door)))
    assert "Traceback" not in server.process.output
