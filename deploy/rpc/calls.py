"""Live Generate calls: one runs an answer between engine and client, all can be found and ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial

from expertmesh.actors.attention.messages import TokenOutput
from expertmesh.deploy.admission.admission import Turn
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.engine_client import Pace, at_the_end
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai import constraints
from expertmesh.deploy.openai.completions import CompletionGeneration
from expertmesh.deploy.openai.errors import unavailable
from expertmesh.deploy.openai.run import all_choices
from expertmesh.deploy.openai.telemetry import Telemetry
from expertmesh.deploy.rpc.answers import Answer, aborted
from expertmesh.deploy.rpc.pipe import Pipe
from expertmesh.deploy.rpc.requests import prepare
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb

Send = Callable[[pb.GenerateResponse], Awaitable[None]]

# Messages that may wait for the client. What a slow reader has not taken stays with the engine's
# client, as tokens, and comes in one message later.
AHEAD = 2
# Between two looks for a stop string, when only the whole answer is wanted.
LOOK_SECONDS = 0.05


class Call:
    """One Generate call that was accepted. `run` it once."""

    def __init__(
        self, front: Front, request: pb.GenerateRequest, request_id: str, key: ApiKey | None
    ) -> None:
        self._front, self._request, self._id, self._key = front, request, request_id, key
        self._pipe: Pipe[pb.GenerateResponse] = Pipe(AHEAD)
        self._reader: asyncio.Task[None] | None = None
        self._answer: Answer | None = None
        self._aborted = self._finished = False

    async def run(self, send: Send, heavy: bool) -> None:
        """Sends the whole answer. Cancelled, or when sending fails, the engine lets go of the
        request. Raises what `run.api_error` knows.

        heavy: preparing the request takes long, so it belongs in a thread.
        """
        self._reader = asyncio.create_task(self._read(heavy))
        try:
            async for message in self._pipe:
                await send(message)
            if self._aborted:
                self._front.telemetry.cancelled()
                for message in self._aborted_ends():
                    await send(message)
        except asyncio.CancelledError:
            if not self._finished:
                self._front.telemetry.cancelled()
            raise
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def abort(self) -> bool:
        """Ends the answer here; whether it was still to be ended. The engine is told at once,
        also while the client takes nothing."""
        if self._pipe.closed:
            return False
        self._aborted = True
        self.fail(None)
        return True

    def fail(self, error: Exception | None) -> None:
        """Ends the call with an error, after what has been made."""
        self._pipe.close(error)
        if self._reader is not None:
            self._reader.cancel()

    def _aborted_ends(self) -> list[pb.GenerateResponse]:
        if self._answer is not None:
            return self._answer.aborted()
        choices = max(1, min(self._request.sampling_params.n, self._front.served.limits.n))
        return [aborted(self._id, index) for index in range(choices)]

    async def _read(self, heavy: bool) -> None:
        front, served = self._front, self._front.served
        try:
            async with asyncio.timeout(served.limits.request_seconds):
                with front.admission.reading(self._key):
                    arguments = self._request, served, self._key
                    if heavy:
                        generation = await asyncio.to_thread(prepare, *arguments)
                    else:
                        generation = prepare(*arguments)
                    await constraints.admit(generation.grammars, served)
                async with front.admission.turn(
                    self._key, generation.requests, lambda: generation.completion_tokens
                ) as turn:
                    await self._generate(generation, turn)
        except Exception as error:
            self._pipe.close(error)
            return
        # Counted before it is sent: a client that has its answer finds it in /metrics.
        front.telemetry.finished(generation)
        self._finished = True
        self._pipe.close()

    async def _generate(self, generation: CompletionGeneration, turn: Turn) -> None:
        client, traffic = self._front.client, self._front.traffic
        self._answer = answer = Answer(generation, self._id)
        clock = TokenClock(generation, self._front.telemetry)
        feeds = [partial(self._feed, answer, clock, i) for i in range(len(turn.requests))]
        pace: Pace = traffic.interval
        if not generation.stream:
            stops = self._request.sampling_params.stop  # which the edge looks for, not the engine
            pace = (lambda: LOOK_SECONDS) if stops else at_the_end
        streams = int(generation.stream)
        traffic.streams += streams
        try:
            choices = all_choices(client, turn.requests, feeds, pace, turn.choice_ended)
            async with aclosing(choices) as pieces:
                async for _ in pieces:
                    await self._pipe.room()
        finally:
            traffic.streams -= streams

    def _feed(
        self, answer: Answer, clock: "TokenClock", index: int, output: TokenOutput
    ) -> tuple[None, bool]:
        """What is counted as answered is in the pipe: an end from outside must not find tokens
        that the client will never see."""
        if self._pipe.closed:
            return None, True  # the reader's task is about to be cancelled
        clock.tokens(index, len(output.token_ids))
        messages, complete = answer.feed(index, output)
        for message in messages:
            self._pipe.push(message)
        return None, complete


class TokenClock:
    """Observes when tokens come, of answers that are read as they come."""

    def __init__(self, generation: CompletionGeneration, telemetry: Telemetry) -> None:
        self._generation, self._telemetry = generation, telemetry
        self._last: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        """`count` tokens of choice `index` have come, before they are counted elsewhere."""
        if not count or not self._generation.stream:
            return
        now = time.perf_counter()
        if index in self._last:
            self._telemetry.between_tokens((now - self._last[index]) / count)
        elif self._generation.first_token_at is None:
            self._telemetry.first_token(now - self._generation.arrived)
        self._last[index] = now


class LiveCalls:
    """By owner and request id. An owner is an API key's name, "" where there are none: nobody can
    end, or even find, the calls of another key."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], set[Call]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def adding(self, owner: str, request_id: str, call: Call) -> Iterator[None]:
        """The call is live inside of the context."""
        name = owner, request_id
        self._calls.setdefault(name, set()).add(call)
        self._idle.clear()
        try:
            yield
        finally:
            self._calls[name].discard(call)
            if not self._calls[name]:
                del self._calls[name]
            if not self._calls:
                self._idle.set()

    def abort(self, owner: str, request_id: str) -> int:
        """How many calls with this id were live."""
        return sum(call.abort() for call in self._calls.get((owner, request_id), ()))

    async def drain(self, seconds: float) -> None:
        """Returns when no call is live: those that still are after `seconds` fail."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            for calls in list(self._calls.values()):
                for call in calls:
                    call.fail(unavailable("the server is stopping"))
