"""A way from producing tasks to one consuming task, which anybody can end."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Pipe(Generic[Item]):
    """What was pushed before `close` still comes out: nothing is ever lost on the way. It is as
    bounded as its producers are patient: each waits for `room` before it makes more."""

    def __init__(self, size: int) -> None:
        """size: items that may wait while there is still room."""
        self._items: deque[Item] = deque()
        self._size = size
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._error: Exception | None = None
        self.closed = False

    def push(self, item: Item) -> None:
        assert not self.closed
        self._items.append(item)
        self._news.set()

    async def room(self) -> None:
        """Returns when fewer than `size` items wait."""
        while len(self._items) >= self._size:
            self._room.clear()
            await self._room.wait()

    def close(self, error: Exception | None = None) -> None:
        """No more items. Only the first close counts. error: raised by the reader's iteration
        after the last item."""
        if not self.closed:
            self.closed, self._error = True, error
            self._news.set()

    async def __aiter__(self) -> AsyncIterator[Item]:
        while True:
            while self._items:
                item = self._items.popleft()
                self._room.set()
                yield item
            if self.closed:
                if self._error is not None:
                    raise self._error
                return
            self._news.clear()
            await self._news.wait()
