"""Clients of every kind at once: streams, whole answers, several choices, mistakes, and some who
leave in the middle."""

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

PROMPTS = ("Once upon a time", "The king said", "When the rain", "My dear friend", "Far away in")


class MixedLoad:
    """ended: how often each kind of client has come to its end."""

    def __init__(
        self, url: str, model: str = "nano", tokens: int = 24, clients: int = 6, key: str = ""
    ) -> None:
        self.url, self.model, self.tokens, self.clients = url, model, tokens, clients
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.ended: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when every client has ended."""
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "a client hangs"

    async def _main(self) -> None:
        headers, limits = self.headers, httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=60, headers=headers, limits=limits
        ) as client:
            await asyncio.gather(*[self._client(client, i) for i in range(self.clients)])

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        kinds = (self._stream, self._stream, self._whole, self._leave, self._mistake)
        while not self._stopping.is_set():
            for kind in kinds[number % 5 :] + kinds[: number % 5]:
                if self._stopping.is_set():
                    return
                with contextlib.suppress(httpx.HTTPError):
                    await kind(client, PROMPTS[number % 5])

    def _body(self, prompt: str, **more: object) -> dict[str, object]:
        return {"model": self.model, "prompt": prompt, "max_tokens": self.tokens,
                "ignore_eos": True} | more  # fmt: skip

    async def _stream(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = self._body(prompt, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                pass
        self.ended["stream"] += 1

    async def _whole(self, client: httpx.AsyncClient, prompt: str) -> None:
        await client.post("/v1/completions", json=self._body(prompt, n=2))
        self.ended["whole"] += 1

    async def _leave(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = self._body(prompt, stream=True, max_tokens=400)
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data"):
                    break
        self.ended["left"] += 1

    async def _mistake(self, client: httpx.AsyncClient, prompt: str) -> None:
        await client.post("/v1/completions", json=self._body(prompt, temperature=-1))
        await client.post("/v1/completions", json=self._body(prompt, model="absent"))
        self.ended["mistake"] += 1


@contextmanager
def mixed_load(url: str, **options: Any) -> Iterator[MixedLoad]:
    load = MixedLoad(url, **options)
    load.start()
    try:
        yield load
    finally:
        load.stop()
