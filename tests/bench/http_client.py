"""A streaming client that costs little: raw sockets, one JSON parse per event, no framework.

On one machine client and server share the cores, so what a client burns is taken from the server.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson


class StreamFailed(RuntimeError):
    """The server answered something else than a complete stream; the text is its answer."""


async def stream_ids(
    host: str, port: int, model: str, prompt: list[int], new: int
) -> AsyncIterator[list[int]]:
    """The generated ids of one greedy streamed completion, as they come."""
    body = orjson.dumps({
        "model": model, "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True,
        "ignore_eos": True, "return_token_ids": True,
    })  # fmt: skip
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            raise StreamFailed((head + await reader.read(2000)).decode("utf-8", "replace"))
        async for line in reader:
            # Chunk sizes and blank lines of the transfer encoding pass by: events start with data.
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                return
            event: dict[str, Any] = orjson.loads(line[6:])
            if "error" in event:
                raise StreamFailed(str(event["error"]))
            if event["choices"] and (ids := event["choices"][0].get("token_ids")):
                yield ids
        raise StreamFailed("the stream ended without [DONE]")
    finally:
        writer.close()
