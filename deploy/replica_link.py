"""This front door's end of one attention replica: its stream, its health, and what it carries."""

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from expertmesh.actors.attention.actor import Refusal, replica_stats
from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineStats,
    GenerateRequest,
    QuotaExceeded,
    RequestRefused,
    TokenOutput,
)
from expertmesh.actors.attention.pieces import CALL_BYTES, Joiner, split
from expertmesh.actors.process import Health
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.cluster.watch import first_line
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.mesh_client import answer_of
from expertmesh.deploy.prefix_index import TOKENS_PER_REQUEST
from expertmesh.deploy.tracked import TrackedRequest

_log = logging.getLogger(__name__)

# Between two looks at a replica, and how long one may take to answer. Together they bound how
# long a silence stays unnoticed (a death also ends the stream at once).
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 3.0
STATS_SECONDS = 2.0
Find = Callable[[], Any]
Taken = asyncio.Future[Refusal | None]


class NotTaken(RuntimeError):
    """The replica cannot take requests, or was lost before it said whether it did."""


class LinkOwner(Protocol):
    """Who gets to know what happens to a link."""

    def deliver(self, link: "ReplicaLink", output: TokenOutput) -> None: ...

    def lost(self, link: "ReplicaLink", reason: str) -> None:
        """Its requests are gone."""

    def link_changed(self, link: "ReplicaLink") -> None:
        """`state` is another than before."""


class ReplicaLink:
    """state: "up" takes requests; "held" keeps what it has and takes no new ones while the mesh
    recovers; "down" has lost them, or was never connected. reason: why it is not up. holder: names
    the process at its other end among all there ever were."""

    def __init__(self, seat: str, find: Find, owner: LinkOwner) -> None:
        """seat: what metrics and messages call it. find: returns the actor's handle."""
        self.seat = seat
        self.state: Literal["up", "held", "down"] = "down"
        self.reason = "not connected yet"
        self.requests: set[TrackedRequest] = set()
        self.queued = 0
        self.trial: TrackedRequest | None = None  # a request under suspicion; one at a time
        self.leaving = False
        self._find, self._owner = find, owner
        self.holder = self._ingress = uuid.uuid4().hex
        self._actor: Any = None
        self._task: asyncio.Task[None] | None = None
        self._pending: list[tuple[GenerateRequest, Taken]] = []
        self._unanswered: set[Taken] = set()
        self._aborts: list[str] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[TokenOutput]).decode

    @property
    def running(self) -> int:
        """Requests that it has from this front door."""
        return len(self.requests)

    @property
    def load(self) -> float:
        """How much it has to do for this front door, in running requests: tokens that are still to
        be computed count as well."""
        return len(self.requests) + self.queued / TOKENS_PER_REQUEST

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """Lets go of the replica. Requests that it still has are lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose("the front door is stopping")

    # --- requests out -------------------------------------------------------------------------

    async def submit(self, request: GenerateRequest) -> None:
        """Returns when the replica has taken it. Requests of one loop turn share a call.

        Raises RequestRefused, EngineBusy or NotTaken.
        """
        taken: Taken = asyncio.get_running_loop().create_future()
        self._pending.append((request, taken))
        self._unanswered.add(taken)
        taken.add_done_callback(self._unanswered.discard)
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._send)
        refusal = await taken
        if refusal is None:
            return
        kind, message, field = refusal
        if kind == "refused":
            raise RequestRefused(message, field)
        if kind == "quota":
            raise QuotaExceeded(message, field)
        raise EngineBusy(message) if kind == "busy" else NotTaken(message)

    def abort(self, wire_id: str) -> None:
        """Nobody waits for this attempt any more. A replica that is silent hears it later."""
        self._aborts.append(wire_id)
        if len(self._aborts) == 1:
            asyncio.get_running_loop().call_soon(self._send_aborts)

    def _send(self) -> None:
        pending = [one for one in self._pending if not one[1].done()]
        self._pending.clear()
        if pending:
            self._spawn(self._submit_all(pending))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _submit_all(self, pending: Sequence[tuple[GenerateRequest, Taken]]) -> None:
        message = self._encode([request for request, _ in pending])
        if len(message) > CALL_BYTES and len(pending) > 1:
            half = len(pending) // 2
            await self._submit_all(pending[:half])
            await self._submit_all(pending[half:])
            return
        try:
            answers = await self._actor.submit.remote(self._ingress, *split(message))
        except Exception as error:
            answers = [("failed", first_line(error), "")] * len(pending)
        for (request, taken), answer in zip(pending, answers, strict=True):
            if not taken.done():
                taken.set_result(None if answer is None else tuple(answer))
            elif answer is None:
                self.abort(request.request_id)  # given up while it was being sent

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        if self._actor is not None:
            self._spawn(_ignoring_errors(self._actor.abort.remote(aborts)))

    async def stats(self) -> EngineStats | None:
        """None when it is down or does not answer in time."""
        if self._actor is None or self.state == "down":
            return None
        try:
            answer = await asyncio.wait_for(answer_of(self._actor.stats.remote()), STATS_SECONDS)
        except Exception:
            return None
        return replica_stats(answer).engine

    async def session(self, call: SessionCall) -> SessionAnswer:
        """Raises EngineUnavailable when the replica cannot be asked or does not answer."""
        if self._actor is None or self.state == "down":
            raise EngineUnavailable(f"{self.seat}: {self.reason}")
        try:
            answer = await answer_of(self._actor.session.remote(self._encode(call)))
        except Exception as error:
            raise EngineUnavailable(f"{self.seat}: {first_line(error)}") from error
        return msgspec.msgpack.decode(answer, type=SessionAnswer)

    # --- outputs in, and health -----------------------------------------------------------------

    async def _keep(self) -> None:
        """Connected, or trying to be, until it is stopped."""
        while True:
            try:
                self._actor = await asyncio.to_thread(self._find)
                reader = asyncio.create_task(self._read(self._actor))
                try:
                    await self._look(self._actor, reader)
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
            except Exception as error:
                self._lose(first_line(error))
            await asyncio.sleep(LOOK_SECONDS)

    async def _read(self, actor: Any) -> None:
        """Hands every message of the stream on. Returns only by an exception."""
        stream = actor.stream.options(num_returns="streaming").remote(self._ingress)
        joiner = Joiner()
        async for reference in stream:
            message = joiner.feed(await reference)
            for output in [] if message is None else self._decode(message):
                self._owner.deliver(self, output)
        raise EngineUnavailable("its stream has ended")

    async def _look(self, actor: Any, reader: "asyncio.Task[None]") -> None:
        """Asks for health until the stream breaks or an answer stays out."""
        while True:
            # With our name: a replica aborts the requests of an ingress that falls silent. Ray
            # does not tell it, it keeps the stream of a dead reader open.
            call = asyncio.ensure_future(answer_of(actor.health.remote(self._ingress)))
            try:
                # The second wait is for the case that this process was held up itself: then the
                # time is over, and the answer lies in a socket that was not read yet.
                for limit in (ANSWER_SECONDS, ANSWER_SECONDS / 10):
                    await asyncio.wait(
                        [call, reader], timeout=limit, return_when=asyncio.FIRST_COMPLETED
                    )
                if reader.done():
                    reader.result()
                if not call.done():
                    raise EngineUnavailable(f"no answer for {ANSWER_SECONDS:g} s")
                health = Health(*call.result())
            finally:
                call.cancel()
            if health.lost:
                self._lose(health.reason)
            elif health.serving:
                self._enter("up", "")
            else:
                self._enter("held", health.reason)
            await asyncio.wait([reader], timeout=LOOK_SECONDS)

    def doubt(self, reason: str) -> None:
        """It failed to take or keep a request; it gets no other before it answers for itself."""
        self._enter("down", reason)

    def _lose(self, reason: str) -> None:
        self._enter("down", reason)
        for taken in list(self._unanswered):
            if not taken.done():
                taken.set_result(("failed", self.reason, ""))
        self._owner.lost(self, f"{self.seat}: {self.reason}")

    def _enter(self, state: Literal["up", "held", "down"], reason: str) -> None:
        changed, self.state = state != self.state, state
        self.reason = "" if state == "up" else reason or "unknown"
        if changed:
            _log.log(logging.INFO if state == "up" else logging.WARNING,
                     "%s is %s %s", self.seat, state, self.reason)  # fmt: skip
            self._owner.link_changed(self)


async def _ignoring_errors(reference: Any) -> None:
    try:
        await reference
    except Exception as error:
        _log.debug("an abort was not heard: %s", first_line(error))
