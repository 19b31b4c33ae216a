"""Where the outputs of one request wait for its reader, and merge when the reader is slow.

Engine steps arrive for all requests at once. Waking every reader for every token is what makes
an HTTP edge expensive, so a reader says how often it wants to be woken (`every`): a stream under
load takes several tokens per chunk, a plain request sleeps until the end. The first and the last
output are never held back. Single-threaded: everything runs on the reader's event loop.
"""

import asyncio
import math
from collections.abc import Callable

from expertmesh.actors.attention.messages import TokenOutput


class Mailbox:
    """One request's queue. put and fail are called by the client, take by the reader."""

    __slots__ = ("_ended", "_error", "_items", "_loop", "_next_at", "_timer", "_waiter", "closed")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ended: Callable[[], None] | None = None
    ) -> None:
        """ended: called once when the last output or an error has come, read or not."""
        self._loop, self._ended = loop, ended
        self._items: list[TokenOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._next_at = 0.0
        self.closed = False

    def put(self, output: TokenOutput) -> None:
        """Add an output. One with a finish_reason closes the mailbox."""
        if self.closed:
            return
        self._items.append(output)
        if output.finish_reason is not None:
            self._close()
        if self._waiter is None:
            return
        if self.closed or self._next_at <= self._loop.time():
            self._wake()
        elif self._timer is None and self._next_at != math.inf:
            self._timer = self._loop.call_at(self._next_at, self._wake)

    def fail(self, error: Exception) -> None:
        """End with an error, after what already arrived has been read."""
        if not self.closed:
            self._error = error
            self._close()
            self._wake()

    def _close(self) -> None:
        self.closed = True
        if self._ended is not None:
            self._ended()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, every: Callable[[], float]) -> TokenOutput:
        """The outputs since the last take, merged. Raises what `fail` was given."""
        while not self._items or (not self.closed and self._next_at > self._loop.time()):
            if self._error is not None and not self._items:
                raise self._error
            self._waiter = self._loop.create_future()
            if self._items and self._timer is None and self._next_at != math.inf:
                self._timer = self._loop.call_at(self._next_at, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        self._next_at = self._loop.time() + every()
        return items[0] if len(items) == 1 else merge(items)


def merge(outputs: list[TokenOutput]) -> TokenOutput:
    """Consecutive outputs of one request as one. The last one's finish and counts hold."""
    first, last = outputs[0], outputs[-1]
    logprobs = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    routed = [output.routed_experts for output in outputs if output.routed_experts]
    return TokenOutput(
        request_id=first.request_id,
        token_ids=[token for output in outputs for token in output.token_ids],
        logprobs=logprobs,
        prompt_logprobs=next(
            (out.prompt_logprobs for out in outputs if out.prompt_logprobs is not None), None
        ),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        error=last.error,
        error_field=last.error_field,
        routed_experts=b"".join(routed) if routed else None,
        prompt_tokens=last.prompt_tokens,
        cached_tokens=max(output.cached_tokens for output in outputs),
        kv=next((out.kv for out in reversed(outputs) if out.kv is not None), None),
    )
