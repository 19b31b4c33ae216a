"""Turns at the engines: limits of each key first, then a fair and bounded wait."""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec

from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.deploy.admission.capacity import Capacity
from expertmesh.deploy.admission.fair_queue import FairQueue, Place
from expertmesh.deploy.admission.meter import Meter
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.edge_settings import QueueSettings
from expertmesh.deploy.openai.errors import ApiError, unavailable
from expertmesh.deploy.openai.telemetry import Telemetry

# Requests without a key are one flow: what a client says of itself, such as `user`, it could
# say differently each time.
ANONYMOUS = ""
# The service rate that Retry-After is made of is that of so many turns.
_RATE_TURNS = 64
MOST_RETRY_SECONDS = 60


@dataclass(eq=False, slots=True)
class _Waiter:
    """granted: None when its turn has come, or the reason why it never will. running: how many of
    its choices have a turn, whether or not its task has woken to see that."""

    choices: int
    running: int = 0
    granted: asyncio.Future[ApiError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """requests: the choices, as urgent as the key may be. choice_ended: to be called when the
    engine has come to the end of one, so that a slow reader does not keep its turn."""

    requests: Sequence[GenerateRequest]
    choice_ended: Callable[[], None]


class Admission:
    """Lives on one event loop; only `drain` may be called from elsewhere.

    A request takes as many turns as it has choices, and starts when fewer than the capacity's
    choices run: the last one may exceed it, so that none is too large to ever start.
    """

    def __init__(self, settings: QueueSettings, capacity: Capacity, telemetry: Telemetry) -> None:
        self._settings, self._capacity, self._telemetry = settings, capacity, telemetry
        self._queue: FairQueue[_Waiter] = FairQueue()
        self._meters: dict[str, Meter] = {}
        self._turns: deque[float] = deque(maxlen=_RATE_TURNS)
        self._looking: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests that wait for a turn."""
        return len(self._queue)

    def check(self, key: ApiKey | None) -> None:
        """Raises ApiError 429 when a limit of the key is reached: before anything is read."""
        if key is not None:
            try:
                self._meter(key.name).check(key, time.monotonic())
            except ApiError:
                self._telemetry.refused("rate_limit")
                raise

    @contextmanager
    def reading(self, key: ApiKey | None) -> Iterator[None]:
        """While a request's body comes and is checked, it counts as one that its key has under way:
        slow uploads, and grammars that wait to be compiled, are as many as its limit at most."""
        meter = self._meter(ANONYMOUS if key is None else key.name)
        meter.in_flight += 1
        try:
            yield
        finally:
            meter.in_flight -= 1

    def _meter(self, name: str) -> Meter:
        return self._meters.setdefault(name, Meter())

    @asynccontextmanager
    async def turn(
        self, key: ApiKey | None, requests: Sequence[GenerateRequest], used: Callable[[], int]
    ) -> "AsyncIterator[Turn]":
        """For all choices of one request: entered when they may run.

        used: tokens generated so far, asked when the turn ends.
        Raises ApiError 429 when a limit of the key is reached or the queue is full, 503 after
        `wait_seconds` or when the server stops. Cancelled, it leaves the queue at once.
        """
        self.check(key)
        flow = ANONYMOUS if key is None else key.name
        meter, now = self._meter(flow), time.monotonic()
        prompt = sum(len(request.prompt_ids) for request in requests)
        answer = meter.expected([request.params.max_tokens for request in requests])
        if key is not None and key.priority is not None:
            requests = [_not_above(request, key.priority) for request in requests]
        charge, ran = meter.begin(now, prompt, answer), False
        try:
            waiter = _Waiter(len(requests))
            await self._granted(waiter, flow, requests[0].priority, max(1, prompt + answer))
            ran = True
            self._telemetry.admitted(time.monotonic() - now)
            try:
                yield Turn(requests, lambda: self._end(waiter, 1))
            finally:
                self._end(waiter, waiter.running)
        finally:
            tokens = used() if ran else None
            meter.end(charge, time.monotonic(), len(requests), tokens)

    async def _granted(self, waiter: _Waiter, flow: str, priority: int, cost: int) -> None:
        """Returns when the waiter's choices may run. Raises ApiError."""
        self._loop = asyncio.get_running_loop()
        if self._draining:
            raise self._refusal("draining")
        full = len(self._queue) >= self._settings.waiting
        if full and self._capacity.known and not self._free:
            self._make_room(flow, priority)
        place = self._queue.push(waiter, flow, priority, cost)
        self._pump()
        self._look()
        try:
            async with asyncio.timeout(self._settings.wait_seconds):
                refusal = await waiter.granted
        except TimeoutError:
            self._leave(place)
            raise self._refusal("timeout") from None
        except asyncio.CancelledError:  # the client has gone
            self._leave(place)
            raise
        if refusal is not None:
            raise refusal

    def _leave(self, place: Place[_Waiter]) -> None:
        if not self._queue.remove(place):
            self._end(place.item, place.item.running)

    @property
    def _free(self) -> bool:
        return self._capacity.known and self.running < self._capacity.limit

    def _make_room(self, flow: str, priority: int) -> None:
        """Raises ApiError 429 when it is the arrival that has to go."""
        out = self._queue.who_gives_way(flow, priority)
        refusal = self._refusal("queue_full")
        if out is None:
            raise refusal
        self._refuse(out, refusal)

    def _refuse(self, place: Place[_Waiter], refusal: ApiError) -> None:
        self._queue.remove(place)
        if not place.item.granted.done():
            place.item.granted.set_result(refusal)

    def _pump(self) -> None:
        while self._queue and self._free:
            waiter = self._queue.pop().item
            if waiter.granted.done():  # its client has gone, and its task has yet to wake
                continue
            waiter.running = waiter.choices
            self.running += waiter.choices
            waiter.granted.set_result(None)
            self._turns.append(time.monotonic())

    def _end(self, waiter: _Waiter, choices: int) -> None:
        choices = min(choices, waiter.running)
        waiter.running -= choices
        self.running -= choices
        self._pump()

    def _look(self) -> None:
        """Keeps the capacity up to date while requests come or wait, and only then."""
        wanted = not self._capacity.fixed and (self._queue or self._capacity.stale)
        if wanted and self._looking is None:
            self._looking = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            while True:
                if self._capacity.stale:
                    await self._capacity.look()
                    self._pump()
                if not self._queue:
                    return
                await asyncio.sleep(self._capacity.period)
        finally:
            self._looking = None

    def drain(self) -> None:
        """Refuses all who wait, and all who come. From any thread, or a signal handler: that may
        stand between any two steps of this object's own work."""
        self._draining = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                self._loop.call_soon_threadsafe(self._refuse_all)

    def _refuse_all(self) -> None:
        for place in list(self._queue):
            self._refuse(place, self._refusal("draining"))

    def _refusal(self, reason: str) -> ApiError:
        self._telemetry.refused(reason)
        if reason == "draining":
            return unavailable("the server is stopping")
        seconds = self._retry_seconds()
        if reason == "timeout":
            limit = self._settings.wait_seconds
            message = f"the request has waited {limit:g} s for a turn"
            return ApiError(503, message, code="queue_timeout", retry_after=seconds)
        message = f"{len(self._queue)} requests wait already"
        return ApiError(429, message, code="queue_full", retry_after=seconds)

    def _retry_seconds(self) -> int:
        """In which as many requests as wait now have had their turn, at the recent rate."""
        if len(self._turns) < 2:
            return 1
        per_turn = (time.monotonic() - self._turns[0]) / len(self._turns)
        return max(1, min(MOST_RETRY_SECONDS, math.ceil(len(self._queue) * per_turn)))


def _not_above(request: GenerateRequest, floor: int) -> GenerateRequest:
    if request.priority >= floor:
        return request
    return msgspec.structs.replace(request, priority=floor)
