"""Outputs on their way to the ingresses: one message per ingress and step."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from expertmesh.actors.attention.messages import TokenOutput
from expertmesh.actors.attention.pieces import results


class Outbox:
    """Messages of one ingress. A later reader takes over from an earlier one, losing nothing."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._reader = 0

    def put(self, message: bytes) -> None:
        self._waiting.append(message)
        self._changed.set()

    def has_reader(self, reader: int) -> bool:
        return self._reader == reader

    def take_over(self) -> int:
        """The number of the new reader; the earlier reader's iteration ends."""
        self._reader += 1
        self._changed.set()
        return self._reader

    def close(self) -> None:
        """The reader's iteration ends: nothing will ever be put here again."""
        self.take_over()

    async def read(self, reader: int) -> AsyncIterator[bytes]:
        while self._reader == reader:
            if self._waiting:
                yield self._waiting.popleft()
            else:
                self._changed.clear()
                await self._changed.wait()


class Outboxes:
    """Who asked for which request, and what is ready for whom.

    `publish` belongs to the engine's thread, everything else to the event loop's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._boxes: dict[str, Outbox] = {}
        self._owner: dict[str, str] = {}  # request -> ingress; plain dict operations are atomic
        self._seen: dict[str, float] = {}
        self._encode = msgspec.msgpack.Encoder().encode

    def claim(self, request_id: str, ingress: str) -> bool:
        """False when the id is in use: its outputs would go to the wrong ingress."""
        if request_id in self._owner:
            return False
        self._owner[request_id] = ingress
        self.box(ingress)  # outputs may come before the stream that reads them
        return True

    def release(self, request_id: str) -> None:
        self._owner.pop(request_id, None)

    def requests_of(self, ingress: str) -> list[str]:
        return [request for request, owner in list(self._owner.items()) if owner == ingress]

    def box(self, ingress: str) -> Outbox:
        if ingress not in self._boxes:
            self._boxes[ingress] = Outbox()
        return self._boxes[ingress]

    def drop(self, ingress: str) -> None:
        """Ends the stream too: an ingress that was only frozen must see that it has to come back,
        or it would wait for ever on a box that nothing is put into."""
        box = self._boxes.pop(ingress, None)
        if box is not None:
            box.close()
        self._seen.pop(ingress, None)

    def seen(self, ingress: str) -> None:
        """The ingress has shown that it lives."""
        self._seen[ingress] = time.monotonic()

    def silent(self, limit_s: float) -> list[str]:
        """Ingresses that used to show signs of life and have not for `limit_s`."""
        since = time.monotonic() - limit_s
        return [ingress for ingress, at in self._seen.items() if at < since]

    def abandon(self, ingress: str, abort: "Abort") -> None:
        """Nobody waits for this ingress's requests any more."""
        for request_id in self.requests_of(ingress):
            abort(request_id)
            self.release(request_id)
        self.drop(ingress)

    def publish(self, outputs: Iterable[TokenOutput]) -> None:
        """One encoding and one wake-up of the event loop per step, not per request."""
        shares: dict[str, list[TokenOutput]] = {}
        for output in outputs:
            ended = output.finish_reason is not None
            get = self._owner.pop if ended else self._owner.get
            ingress = get(output.request_id, None)
            if ingress is not None:
                shares.setdefault(ingress, []).append(output)
        messages = [(ingress, self._encode(share)) for ingress, share in shares.items()]
        if messages:
            self._loop.call_soon_threadsafe(self._post, messages)

    def _post(self, messages: list[tuple[str, bytes]]) -> None:
        for ingress, message in messages:
            box = self._boxes.get(ingress)
            if box is not None:  # else it was dropped since, and its requests are dead
                box.put(message)


Abort = Callable[[str], None]


async def stream(boxes: Outboxes, ingress: str, abort: Abort) -> AsyncIterator[bytes]:
    """The messages of `ingress`, in pieces, until another stream of it takes over or it is
    abandoned.

    When the reader goes away for good, nobody waits for its requests any more: they are aborted.
    """
    box = boxes.box(ingress)
    reader = box.take_over()
    try:
        async for message in box.read(reader):
            for piece in results(message):
                yield piece
    finally:
        if box.has_reader(reader):
            boxes.abandon(ingress, abort)
