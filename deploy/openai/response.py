"""The ASGI response of a generation: plain or streamed, ended by error, deadline or disconnect."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expertmesh.actors.attention.messages import TokenOutput
from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.engine_client import Pace, at_the_end
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.errors import ApiError, unavailable
from expertmesh.deploy.openai.generation import DONE, KEEP_ALIVE, Generation, event
from expertmesh.deploy.openai.run import Feed, all_choices, api_error

_log = logging.getLogger(__name__)

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


# How long a client may take to read why its answer ends.
_LAST_WORDS_SECONDS = 5.0


class GenerationResponse(Response):
    """Runs `generation` against the client when the server calls it."""

    def __init__(
        self,
        generation: Generation,
        front: Front,
        early_stop: bool,
        key: ApiKey | None = None,
    ) -> None:
        """early_stop: the edge may end a choice before the engine does (stop strings). key: whose
        request it is, where keys are needed."""
        super().__init__()
        self._generation = generation
        self._client, self._telemetry = front.client, front.telemetry
        self._traffic, self._admission = front.traffic, front.admission
        self._key = key
        self._early_stop = early_stop
        self._limits = generation.served.limits
        self._started = False
        self._opening = b""
        self._sent_at = 0.0
        # Two write: the answer and, while it is silent, the heartbeat.
        self._writing = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._traffic.accepted():
            await self._answer(receive, send)

    async def _answer(self, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._telemetry.cancelled()
        except asyncio.CancelledError:
            # The server stops and the grace time is over. Without this the stream would look
            # like a short but complete answer.
            work.cancel()
            await self._send_error(unavailable("the server is stopping"), send)
            raise
        finally:
            # Cancelling closes the client's iterators, which aborts the request in the engine.
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _run(self, send: Send) -> None:
        generation = self._generation
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                if generation.stream:
                    await self._stream(send)
                else:
                    await self._plain(send)
        except Exception as error:
            known = api_error(error)
            if known is None:
                _log.exception("request %s failed", generation.id)
                known = ApiError(500, "internal error")
            self._telemetry.failed(known)
            await self._send_error(known, send)

    def _pace(self) -> Pace:
        if self._generation.stream:
            return self._traffic.interval
        return (lambda: 0.05) if self._early_stop else at_the_end

    def _feeds(self) -> list[Feed[bytes]]:
        generation, telemetry = self._generation, self._telemetry

        def one(index: int) -> Callable[[TokenOutput], tuple[bytes, bool]]:
            last: float | None = None

            def feed(output: TokenOutput) -> tuple[bytes, bool]:
                nonlocal last
                if output.token_ids and generation.stream:
                    now = time.perf_counter()
                    if last is not None:
                        telemetry.between_tokens((now - last) / len(output.token_ids))
                    elif generation.first_token_at is None:
                        telemetry.first_token(now - generation.arrived)
                    last = now
                return generation.feed(index, output)

            return feed

        return [one(index) for index in range(len(generation.requests))]

    @asynccontextmanager
    async def _pieces(self) -> AsyncIterator[AsyncIterator[tuple[int, bytes]]]:
        """(choice, bytes) as they come, once the request has its turn."""
        generation, streams = self._generation, int(self._generation.stream)
        async with self._admission.turn(
            self._key, generation.requests, lambda: generation.completion_tokens
        ) as turn:
            self._traffic.streams += streams  # those that wait do not write
            try:
                async with aclosing(
                    all_choices(
                        self._client, turn.requests, self._feeds(), self._pace(), turn.choice_ended
                    )
                ) as pieces:
                    yield pieces
            finally:
                self._traffic.streams -= streams

    async def _plain(self, send: Send) -> None:
        generation = self._generation
        async with self._pieces() as pieces:
            async for _ in pieces:
                pass
        # Counted before it is sent: a client that has its answer finds it in /metrics.
        self._telemetry.finished(generation)
        self._started = True
        response = Response(generation.body(), media_type="application/json")
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body})

    async def _stream(self, send: Send) -> None:
        generation = self._generation
        self._opening = generation.opening()  # before any token, which its usage would count
        heartbeat = asyncio.create_task(self._heartbeat(send))
        try:
            async with self._pieces() as pieces:
                # One event behind, so that the last tokens, usage and [DONE] share one write.
                held = b""
                async for _, piece in pieces:
                    if held:
                        await self._write(held, send)
                        held = b""
                    if generation.complete:
                        held = piece
                    elif piece:
                        await self._write(piece, send)
            self._telemetry.finished(generation)
            await self._write(held + generation.closing(), send, more=False)
        finally:
            heartbeat.cancel()

    async def _write(self, data: bytes, send: Send, more: bool = True) -> None:
        async with self._writing:
            self._sent_at = time.monotonic()
            if not self._started:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
                )
                self._started = True
                data = self._opening + data
            await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _heartbeat(self, send: Send) -> None:
        """Comments while nothing else is sent. The first one also opens the stream, so until
        then a failure still has its status code."""
        period = self._limits.keep_alive_seconds
        self._sent_at = time.monotonic()
        while True:
            silent = time.monotonic() - self._sent_at
            await asyncio.sleep(max(period - silent, 0.01))
            if time.monotonic() - self._sent_at >= period:
                await self._write(KEEP_ALIVE, send)

    async def _send_error(self, error: ApiError, send: Send) -> None:
        """Gives up on a client that does not read: nothing of it may stay here for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                if not self._started:
                    response = error.response()
                    headers = response.raw_headers
                    status = response.status_code
                    await send(
                        {"type": "http.response.start", "status": status, "headers": headers}
                    )
                    await send({"type": "http.response.body", "body": bytes(response.body)})
                elif self._generation.stream:
                    body = event(error.envelope()) + DONE
                    await send({"type": "http.response.body", "body": body, "more_body": False})


async def _disconnected(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
