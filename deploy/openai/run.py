"""Running the choices of one HTTP request, and telling what went wrong in the API's terms."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineFailed,
    GenerateRequest,
    QuotaExceeded,
    RequestRefused,
    TokenOutput,
)
from expertmesh.deploy.engine_client import Ended, EngineClient, EngineUnavailable, Pace
from expertmesh.deploy.openai.errors import QUOTA, ApiError, bad, unavailable

Delta = TypeVar("Delta")
Feed = Callable[[TokenOutput], tuple[Delta, bool]]


def api_error(error: BaseException) -> ApiError | None:
    """The envelope of a known failure; None for what is a bug of ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QuotaExceeded):
        return ApiError(429, str(error), error.field, QUOTA, retry_after=1)
    if isinstance(error, RequestRefused):
        return bad(str(error), error.field, "invalid_value")
    if isinstance(error, EngineBusy):
        return ApiError(429, str(error) or "the queue is full", retry_after=1)
    if isinstance(error, EngineUnavailable | EngineFailed):
        return unavailable(str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than this server allows")
    return None


async def one_choice(
    client: EngineClient, request: GenerateRequest, feed: "Feed[Delta]", pace: Pace,
    ended: Ended = None,
) -> AsyncGenerator[Delta, None]:  # fmt: skip
    """Deltas of one choice. `feed` says when it is complete, which may be before the engine's
    end (a stop string); leaving the generator aborts the request."""
    async with aclosing(client.generate(request, pace, ended)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.error_field is not None:
                raise bad(output.error or "the request failed", output.error_field)
            if output.finish_reason in ("error", "abort"):
                raise unavailable(output.error or "the request was aborted")
            delta, complete = feed(output)
            yield delta
            if complete:
                return
    raise unavailable("the engine ended the request without a reason")


async def all_choices(
    client: EngineClient, requests: Sequence[GenerateRequest], feeds: "Sequence[Feed[Delta]]",
    pace: Pace, ended: Ended = None,
) -> AsyncGenerator[tuple[int, Delta], None]:  # fmt: skip
    """(choice, delta) of all choices as they come. The first failure ends them all. ended: see
    EngineClient.generate; called for each choice."""
    if len(requests) == 1:
        async with aclosing(one_choice(client, requests[0], feeds[0], pace, ended)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # Bounded: a client that reads slowly must not make this process hold its whole answer twice.
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue(
        4 * len(requests)
    )

    async def pump(index: int) -> None:
        try:
            choice = one_choice(client, requests[index], feeds[index], pace, ended)
            async with aclosing(choice) as deltas:
                async for delta in deltas:
                    await queue.put((index, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(index)) for index in range(len(requests))]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
