"""One piece of work for all who ask for it at the same time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Runs `work` once at a time. Who asks while it runs gets the result of the next run, never of
    one that began before he asked: nothing piles up, and nobody reads what is older than his
    question. Belongs to one event loop.
    """

    def __init__(self, work: Callable[[], Awaitable[T]]) -> None:
        self._work = work
        self._running: asyncio.Task[T] | None = None
        self._next: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Raises what the work raises."""
        if self._next is None:
            self._next = asyncio.create_task(self._run(self._running))
        # Who gives up does not take the result from the others.
        return await asyncio.shield(self._next)

    async def _run(self, before: "asyncio.Task[T] | None") -> T:
        if before is not None:
            await asyncio.wait([before])
        self._running, self._next = self._next, None
        return await self._work()
