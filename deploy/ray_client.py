"""The EngineClient over attention actors: one stream per replica, whatever the requests.

A replica sends one message per step with the outputs of all requests of this ingress; they are
handed to mailboxes here. A request is sent to the replica with the fewest requests of ours.
Losing a replica fails exactly the requests it had.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from expertmesh.actors.attention.actor import Refusal, ReplicaStats
from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineStats,
    GenerateRequest,
    RequestRefused,
    TokenOutput,
)
from expertmesh.cluster.watch import first_line
from expertmesh.deploy.engine_client import EngineUnavailable, Pace, at_once
from expertmesh.deploy.mailbox import Mailbox

_log = logging.getLogger(__name__)

# Between two looks at a replica, and how long one may take to answer. Together they bound how
# long /ready can lag behind a death (a death also ends the stream at once).
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 3.0
STATS_SECONDS = 2.0

Find = Callable[[], Any]


class RayEngineClient:
    """`start` it on the event loop that will use it; `find` functions return actor handles."""

    def __init__(self, replicas: Mapping[str, Find]) -> None:
        """replicas: name -> how to find the actor (again, after it was replaced)."""
        self._mailboxes: dict[str, Mailbox] = {}
        self._links = [Link(name, find, self._mailboxes) for name, find in replicas.items()]
        self._placed: dict[str, Link] = {}

    def start(self) -> None:
        """Connect in the background. Until it has, `ready` is false."""
        for link in self._links:
            link.start()

    async def stop(self) -> None:
        await asyncio.gather(*[link.stop() for link in self._links])

    async def generate(
        self, request: GenerateRequest, pace: Pace = at_once
    ) -> AsyncIterator[TokenOutput]:
        link = self._least_loaded()
        mailbox = Mailbox(asyncio.get_running_loop(), link)
        self._mailboxes[request.request_id] = mailbox
        self._placed[request.request_id] = link
        link.load += 1
        taken = finished = False
        try:
            await link.submit(request)
            taken = True
            while not finished:
                output = await mailbox.take(pace)
                finished = output.finish_reason is not None
                yield output
        finally:
            link.load -= 1
            del self._mailboxes[request.request_id]
            if taken and not finished:
                self.abort(request.request_id)
            del self._placed[request.request_id]

    def _least_loaded(self) -> "Link":
        up = [link for link in self._links if not link.down]
        if not up:
            raise EngineUnavailable(self.ready()[1])
        return min(up, key=lambda link: link.load)

    def abort(self, request_id: str) -> None:
        link = self._placed.get(request_id)
        if link is not None:
            link.abort(request_id)

    def ready(self) -> tuple[bool, str]:
        """One healthy replica serves; the reasons of all when none does."""
        if any(not link.down for link in self._links):
            return True, ""
        return False, "; ".join(f"{link.name}: {link.down}" for link in self._links)

    async def stats(self) -> Mapping[str, EngineStats | None]:
        answers = await asyncio.gather(*[link.stats() for link in self._links])
        return {
            link.name: stats
            for link, stats in zip(self._links, answers, strict=True)
            if stats is not None or link.down
        }


class Link:
    """This ingress's end of one replica: its stream, its health, and what it carries."""

    def __init__(self, name: str, find: Find, mailboxes: dict[str, Mailbox]) -> None:
        self.name = name
        self.load = 0
        self.down = "not connected yet"
        self._find = find
        self._mailboxes = mailboxes
        self._ingress = uuid.uuid4().hex
        self._actor: Any = None
        self._task: asyncio.Task[None] | None = None
        self._pending: list[tuple[GenerateRequest, asyncio.Future[Refusal | None]]] = []
        self._unanswered: set[asyncio.Future[Refusal | None]] = set()
        self._aborts: list[str] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(list[TokenOutput]).decode

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose("the front door is stopping")

    async def submit(self, request: GenerateRequest) -> None:
        """Returns when the replica has taken it. Requests of one loop turn share a call."""
        taken: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
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
        raise EngineBusy(message) if kind == "busy" else EngineUnavailable(message)

    def abort(self, request_id: str) -> None:
        self._aborts.append(request_id)
        if len(self._aborts) == 1:
            asyncio.get_running_loop().call_soon(self._send_aborts)

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        task = asyncio.get_running_loop().create_task(self._submit_all(pending))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _submit_all(
        self, pending: Sequence[tuple[GenerateRequest, asyncio.Future[Refusal | None]]]
    ) -> None:
        message = self._encode([request for request, _ in pending])
        try:
            answers = await self._actor.submit.remote(self._ingress, message)
        except Exception as error:
            answers = [("failed", first_line(error), "")] * len(pending)
        for (request, taken), answer in zip(pending, answers, strict=True):
            if not taken.done():
                taken.set_result(None if answer is None else tuple(answer))
            elif answer is None:
                self.abort(request.request_id)  # its caller gave up while it was being sent

    def _send_aborts(self) -> None:
        aborts, self._aborts = self._aborts, []
        if self._actor is not None and not self.down:
            self._actor.abort.remote(aborts)

    async def stats(self) -> EngineStats | None:
        """None when it is down or does not answer in time."""
        if self._actor is None or self.down:
            return None
        try:
            answer = await asyncio.wait_for(_answer(self._actor.stats.remote()), STATS_SECONDS)
        except Exception:
            return None
        return msgspec.msgpack.decode(answer, type=ReplicaStats).engine

    async def _keep(self) -> None:
        """Connected, or trying to be, for as long as the front door lives."""
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
        """Hand every message of the stream to the mailboxes. Returns only by an exception."""
        stream = actor.stream.options(num_returns="streaming").remote(self._ingress)
        async for reference in stream:
            for output in self._decode(await reference):
                mailbox = self._mailboxes.get(output.request_id)
                if mailbox is not None:
                    mailbox.put(output)
        raise EngineUnavailable("its stream has ended")

    async def _look(self, actor: Any, reader: "asyncio.Task[None]") -> None:
        """Ask for health until the stream breaks or an answer stays out."""
        while True:
            # With our name: a replica aborts the requests of an ingress that falls silent. Ray
            # does not tell it, it keeps the stream of a dead reader open.
            health = asyncio.ensure_future(_answer(actor.health.remote(self._ingress)))
            try:
                await asyncio.wait(
                    [health, reader], timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if reader.done():
                    reader.result()
                if not health.done():
                    raise EngineUnavailable(f"no answer for {ANSWER_SECONDS:g} s")
                healthy, reason = health.result()
            finally:
                health.cancel()
            if healthy:
                self.down = ""
            else:
                # The engine ends its own requests with the reason; what it misses ends here.
                self._lose(reason)
            await asyncio.wait([reader], timeout=LOOK_SECONDS)

    def _lose(self, reason: str) -> None:
        if not self.down:
            _log.error("%s: %s", self.name, reason)
        self.down = reason or "unknown"
        for taken in list(self._unanswered):
            if not taken.done():
                taken.set_result(("failed", f"{self.name}: {self.down}", ""))
        for mailbox in list(self._mailboxes.values()):
            if mailbox.key is self:
                mailbox.fail(EngineUnavailable(f"{self.name}: {self.down}"))


async def _answer(reference: Any) -> Any:
    return await reference
