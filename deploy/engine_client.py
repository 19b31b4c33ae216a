"""How the front door reaches engines: one protocol, and the client for an engine in this process.

The client over attention actors is `ray_client.py`. Both deliver through mailboxes, so that the
rest of the edge never sees threads, actors or steps.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Protocol

from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import (
    EngineFailed,
    EngineStats,
    GenerateRequest,
    TokenOutput,
)
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.deploy.mailbox import Mailbox

Pace = Callable[[], float]
Ended = Callable[[], None] | None

# A step that runs this long is not slow but stuck; readiness goes red before clients time out.
STALL_SECONDS = 60.0
# Saving and loading a session have deadlines of their own, which grow with its size.
SESSION_SECONDS = 120.0


class EngineUnavailable(RuntimeError):
    """No engine can take, or finish, the request. The front door answers 503."""


def at_once() -> float:
    """Pace of a reader that wants every output as it comes."""
    return 0.0


def at_the_end() -> float:
    """Pace of a reader that only wants the whole answer."""
    return math.inf


class EngineClient(Protocol):
    """What the OpenAI app needs of whatever generates tokens."""

    def generate(
        self, request: GenerateRequest, pace: Pace = at_once, ended: Ended = None
    ) -> AsyncIterator[TokenOutput]:
        """Outputs until one has a finish_reason. Closing the iterator early aborts the request.

        ended: called when the engine has come to the end, however far the reader is; not when the
        iterator is closed before.

        Raises RequestRefused when the request can never be served, EngineUnavailable when the
        engine is or becomes unable to.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Stop generating. Unknown ids are ignored."""
        ...

    def ready(self) -> tuple[bool, str]:
        """Whether a request sent now would be served, and if not, why. Never blocks."""
        ...

    async def stats(self) -> Mapping[str, EngineStats | None]:
        """Counters by engine name; None for one that is down. One that is only too busy to answer
        in time is left out."""
        ...

    async def session(self, call: SessionCall) -> SessionAnswer:
        """What becomes of a session. Raises EngineUnavailable when no engine answers."""
        ...


class LocalEngineClient:
    """Over an EngineLoop in this process. Its thread publishes one list of outputs per step."""

    def __init__(self, name: str = "0") -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._engine_loop: EngineLoop | None = None
        self._mailboxes: dict[str, Mailbox] = {}

    def attach(self, engine_loop: EngineLoop) -> None:
        """Bind the loop whose `publish` is this client's. Apart, as each needs the other."""
        self._engine_loop = engine_loop

    @property
    def engine_loop(self) -> EngineLoop:
        assert self._engine_loop is not None, "attach(engine_loop) before use"
        return self._engine_loop

    def publish(self, outputs: Sequence[TokenOutput]) -> None:
        """Called on the engine's thread: one wake-up of the event loop per step, not per token."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)

    async def generate(
        self, request: GenerateRequest, pace: Pace = at_once, ended: Ended = None
    ) -> AsyncIterator[TokenOutput]:
        ready, reason = self.ready()
        if not ready:
            raise EngineUnavailable(reason)
        self._loop = asyncio.get_running_loop()
        mailbox = self._mailboxes[request.request_id] = Mailbox(self._loop, ended)
        finished = False
        try:
            self.engine_loop.engine.submit(request)
            while not finished:
                output = await mailbox.take(pace)
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._mailboxes[request.request_id]
            if not finished:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        self.engine_loop.engine.abort(request_id)

    def ready(self) -> tuple[bool, str]:
        failed = self.engine_loop.failed
        if failed is not None:
            return False, failed
        seconds = self.engine_loop.seconds_in_step()
        if seconds > STALL_SECONDS:
            return False, f"the engine's step has been running for {seconds:.0f} s"
        return True, ""

    async def stats(self) -> Mapping[str, EngineStats]:
        return {self._name: self.engine_loop.engine.stats()}

    async def session(self, call: SessionCall) -> SessionAnswer:
        try:
            answer = self.engine_loop.engine.session(call)
            return await asyncio.wait_for(asyncio.wrap_future(answer), SESSION_SECONDS)
        except EngineFailed as error:
            raise EngineUnavailable(str(error)) from error
        except TimeoutError:
            raise EngineUnavailable(f"no answer within {SESSION_SECONDS:g} s") from None
