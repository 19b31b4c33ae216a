"""The load of every benchmark: a closed batch of greedy requests of equal length."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams, TokenOutput
from expertmesh.deploy.engine_client import EngineClient
from tests.bench.workers.protocol import Clock

PROMPT_TOKENS = 32


def prompts(count: int, vocab: int, length: int = PROMPT_TOKENS, seed: int = 0) -> list[list[int]]:
    """Distinct random prompts. The same for every system of a run."""
    rng = np.random.default_rng(seed)
    return rng.integers(3, vocab, (count, length)).tolist()  # type: ignore[no-any-return]


def greedy(name: str, prompt: list[int], new: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    return GenerateRequest(name, prompt, params)


async def closed_batch(
    streams: list[AsyncIterator[list[int]]], clock_of: Callable[[int], Clock] = Clock
) -> dict[str, Any]:
    """Reads all streams of new ids to their ends at once; a `Clock.timing`."""
    clock = clock_of(len(streams))

    async def read(stream: AsyncIterator[list[int]]) -> list[int]:
        ids: list[int] = []
        async for new in stream:
            clock.ids(len(new), first_of=int(bool(new) and not ids))
            ids += new
        clock.finished()
        return ids

    return clock.timing(await asyncio.gather(*map(read, streams)))


async def ids_of(outputs: AsyncIterator[TokenOutput]) -> AsyncIterator[list[int]]:
    """The id lists of an engine client's stream. Raises RuntimeError when the request fails."""
    async for output in outputs:
        if output.finish_reason in ("error", "abort"):
            raise RuntimeError(f"{output.request_id}: {output.finish_reason} {output.error}")
        yield output.token_ids


class ClientLoad:
    """`protocol.System`'s questions, put to an engine client."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._runs = 0

    async def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        self._runs += 1
        requests = [
            greedy(f"load-{self._runs}-{at}", prompt, new) for at, prompt in enumerate(prompts)
        ]
        return await closed_batch([ids_of(self._client.generate(r)) for r in requests])

    async def score(self, ids: list[int]) -> dict[str, list[Any]]:
        self._runs += 1
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1, logprobs=1
        )
        request = GenerateRequest(f"score-{self._runs}", ids, params)
        best: list[tuple[int, float]] = []
        async for output in self._client.generate(request):
            for entry in (output.prompt_logprobs or []) + (output.logprobs or []):
                if entry is not None:
                    best.append(entry.top[0])
        return {"argmax": [token for token, _ in best], "logprob": [value for _, value in best]}
