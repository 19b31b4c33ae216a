"""Live Generate calls: one runs an answer between engine and client, all can be found and ended."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from expertmesh.actors.attention.messages import TokenOutput
from expertmesh.deploy.admission.admission import Turn
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.engine_client import Pace, at_the_end
from expertmesh.deploy.front import Front
from expertmesh.deploy.grpc.answers import Answer
from expertmesh.deploy.grpc.pipe import Pipe
from expertmesh.deploy.grpc.v1 import engine_pb2 as pb
from expertmesh.deploy.openai.completions import CompletionGeneration
from expertmesh.deploy.openai.errors import unavailable
from expertmesh.deploy.openai.run import Feed, all_choices

Send = Callable[[pb.GenerateResponse], Awaitable[None]]

# Messages between engine and client. What a slow reader has not taken stays with the engine's
# client, as tokens, and comes in one message later.
AHEAD = 2
# Between two looks for a stop string, when only the whole answer is wanted.
LOOK_SECONDS = 0.05


class Call:
    """One Generate call that was accepted. `run` it once."""

    def __init__(self, front: Front, request_id: str, key: ApiKey | None) -> None:
        self._front, self._id, self._key = front, request_id, key
        self._pipe: Pipe[pb.GenerateResponse] = Pipe(AHEAD)
        self._reader: asyncio.Task[None] | None = None
        self._aborted = self._finished = False

    async def run(self, generation: CompletionGeneration, early_stop: bool, send: Send) -> None:
        """Sends the whole answer. Cancelled, or when sending fails, the engine lets go of the
        request. Raises what `run.api_error` knows.

        early_stop: the edge may end a choice before the engine does (stop strings).
        """
        answer = Answer(generation, self._id)
        if not self._aborted:
            self._reader = asyncio.create_task(self._read(generation, answer, early_stop))
        try:
            async for message in self._pipe:
                await send(message)
            if self._aborted:
                self._front.telemetry.cancelled()
                for message in answer.aborted():
                    await send(message)
        except asyncio.CancelledError:
            if not self._finished:
                self._front.telemetry.cancelled()
            raise
        finally:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)

    def abort(self) -> bool:
        """Ends the answer here; whether it was still to be ended. The engine is told at once,
        also while the client takes nothing."""
        if self._pipe.closed:
            return False
        self._aborted = True
        self._end(None)
        return True

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, after what has been made."""
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self._pipe.close(error)
        if self._reader is not None:
            self._reader.cancel()

    async def _read(
        self, generation: CompletionGeneration, answer: Answer, early_stop: bool
    ) -> None:
        front = self._front
        try:
            async with asyncio.timeout(front.served.limits.request_seconds):
                async with front.admission.turn(
                    self._key, generation.requests, lambda: generation.completion_tokens
                ) as turn:
                    await self._generate(turn, generation, answer, early_stop)
        except Exception as error:
            self._pipe.close(error)
            return
        # Counted before it is sent: a client that has its answer finds it in /metrics.
        front.telemetry.finished(generation)
        self._finished = True
        self._pipe.close()

    async def _generate(
        self,
        turn: Turn,
        generation: CompletionGeneration,
        answer: Answer,
        early_stop: bool,
    ) -> None:
        client, traffic = self._front.client, self._front.traffic
        requests = turn.requests
        feeds = [self._feed(turn, generation, answer, index) for index in range(len(requests))]
        streams = int(generation.stream)
        pace: Pace = traffic.interval
        if not generation.stream:
            pace = (lambda: LOOK_SECONDS) if early_stop else at_the_end
        traffic.streams += streams
        try:
            async with aclosing(all_choices(client, requests, feeds, pace)) as pieces:
                async for _, messages in pieces:
                    for message in messages:
                        await self._pipe.put(message)
        finally:
            traffic.streams -= streams

    def _feed(
        self, turn: Turn, generation: CompletionGeneration, answer: Answer, index: int
    ) -> Feed[list[pb.GenerateResponse]]:
        telemetry = self._front.telemetry
        last: float | None = None

        def feed(output: TokenOutput) -> tuple[list[pb.GenerateResponse], bool]:
            nonlocal last
            if output.token_ids and generation.stream:
                now = time.perf_counter()
                if last is not None:
                    telemetry.between_tokens((now - last) / len(output.token_ids))
                elif generation.first_token_at is None:
                    telemetry.first_token(now - generation.arrived)
                last = now
            messages, complete = answer.feed(index, output)
            if complete:
                turn.choice_ended()
            return messages, complete

        return feed


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
