"""The EngineClient over the attention replicas of a mesh, as many as there are at the moment.

A directory says which replicas exist; each has a link. A request goes to the replica that has
least to do for this front door, where what it has computed of the prompt already needs no doing
(prefix_index.py). What comes back is remembered, so that a request outlives its replica. It goes on
elsewhere, after the last token that arrived, when its replica

- dies, breaks its stream, falls silent, or says that it has lost its requests or aborted one:
  at once, or as soon as a replica is there;
- leaves the directory: what ends within `drain_s` ends where it is; the rest is handed over
  then, if there is another replica, and otherwise stays for as long as its replica lives.

A request that keeps losing replicas may be why they are lost. After SUSPICIOUS losses in a row
without a token it is tried beside no other suspect, and after MOST_LOSSES it ends with the reason.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineStats,
    GenerateRequest,
    RequestRefused,
    TokenOutput,
)
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.cluster.directory import Directory
from expertmesh.cluster.watch import first_line
from expertmesh.deploy import replica_link
from expertmesh.deploy.engine_client import Ended, EngineUnavailable, Pace, at_once
from expertmesh.deploy.mailbox import Mailbox
from expertmesh.deploy.prefix_index import Choice, PrefixIndex, Route, Why
from expertmesh.deploy.replica_link import NotTaken, ReplicaLink
from expertmesh.deploy.replica_sessions import ask_replicas
from expertmesh.deploy.tracked import TrackedRequest

_log = logging.getLogger(__name__)

SUSPICIOUS = 2
MOST_LOSSES = 3
# Over the whole answer, however much of it came between two losses.
MOST_LOSSES_IN_ALL = 30
# Pause before a request that has begun elsewhere asks a busy replica again.
BUSY_SECONDS = 0.1

# The directory as soon as it is another than version `seen`, at the latest after some seconds.
ReadDirectory = Callable[[int], Awaitable[Directory]]
FindActor = Callable[[str], Any]


class RayEngineClient:
    """`start` it on the event loop that will use it."""

    def __init__(
        self,
        read_directory: ReadDirectory,
        find_actor: FindActor,
        *,
        hold_s: float = 60.0,
        patience_s: float = 5.0,
        drain_s: float = 5.0,
    ) -> None:
        """find_actor: a handle by the actor's name; called in a thread.

        hold_s: how long a request waits for a replica when there is none. patience_s: how long
        this front door calls itself ready without one, if the directory says that the mesh serves.
        """
        self._read_directory, self._find_actor = read_directory, find_actor
        self._hold_s, self._patience_s, self._drain_s = hold_s, patience_s, drain_s
        self._directory = Directory(version=-1, reason="the mesh has not been found yet")
        self._links: dict[str, ReplicaLink] = {}  # by actor name
        self._leaving: dict[ReplicaLink, asyncio.Task[None]] = {}
        self._requests: dict[str, TrackedRequest] = {}  # by the client's id
        self._attempts: dict[str, TrackedRequest] = {}  # by the id on the wire
        self._prefixes = PrefixIndex()
        self.placed: Callable[[Why], None] = lambda why: None  # told of each request's replica
        self._changed = asyncio.Event()  # replaced whenever it is set: all waiters look again
        self._some_up, self._none_up_since = False, float("-inf")
        self._follower: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connects in the background. Until it has, `ready` is false."""
        self._follower = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self) -> None:
        """Ends every request with an error."""
        tasks = [*self._leaving.values(), *([self._follower] if self._follower else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for tracked in list(self._requests.values()):
            tracked.mailbox.fail(EngineUnavailable("the front door is stopping"))
        self._notify()
        await asyncio.gather(*[link.stop() for link in [*self._links.values(), *self._leaving]])

    # --- EngineClient -------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, pace: Pace = at_once, ended: Ended = None
    ) -> AsyncIterator[TokenOutput]:
        ready, reason = self.ready()
        if not ready:
            raise EngineUnavailable(reason)
        if request.request_id in self._requests:
            raise RequestRefused(
                f"request id {request.request_id!r} is already in use", "request_id"
            )
        tracked = TrackedRequest(request, Mailbox(asyncio.get_running_loop(), ended))
        self._requests[request.request_id] = tracked
        finished = False
        try:
            await self._place(tracked)
            while not finished:
                output = await tracked.mailbox.take(pace)
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._requests[request.request_id]
            tracked.mailbox.closed = True
            if tracked.mover is not None:
                tracked.mover.cancel()
            self._detach(tracked, abort=not finished)

    def abort(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._detach(tracked, abort=True)
            tracked.mailbox.put(TokenOutput(request_id=request_id, finish_reason="abort"))
            self._notify()  # it may be waiting for a replica

    def ready(self) -> tuple[bool, str]:
        """The mesh serves, and a replica takes requests or is about to."""
        if not self._directory.serving:
            return False, self._directory.reason
        if self._up():
            return True, ""
        if time.monotonic() - self._none_up_since < self._patience_s:
            return True, ""
        reasons = [f"{link.seat}: {link.reason}" for link in self._links.values()]
        return False, "; ".join(reasons) or "there is no attention replica"

    async def stats(self) -> Mapping[str, EngineStats | None]:
        links = list(self._links.values())
        answers = await asyncio.gather(*[link.stats() for link in links])
        return {
            link.seat: stats
            for link, stats in zip(links, answers, strict=True)
            if stats is not None or link.state == "down"
        }

    async def session(self, call: SessionCall) -> SessionAnswer:
        def seated(session: str, link: ReplicaLink) -> None:
            self._prefixes.seated(call.tenant, session, link.holder)

        ready, reason = self.ready()
        if not ready:
            raise EngineUnavailable(reason)
        # Also those that are down: they may only be silent, and know it all the same.
        holders = list(self._links.values())
        if call.verb == "delete":  # turns that end where they are, before these go, must not save
            holders += [link for link in self._leaving if link.state != "down"]
        answer = await ask_replicas(call, holders, seated)
        if call.verb == "delete" and answer.problem in (None, "unknown"):
            for tracked in self._requests.values():  # a replica that is new has not been told
                tracked.drop_session(call.tenant, call.session)
        return answer

    # --- placing ------------------------------------------------------------------------------

    async def _place(self, tracked: TrackedRequest) -> None:
        """Returns when a replica has taken the request, or with an error in its mailbox."""
        tracked.placing = True
        tracked.deadline = time.monotonic() + self._hold_s
        route = self._prefixes.route(tracked.request)
        try:
            while choice := await self._next_link(tracked, route):
                self._prefixes.placed(route, choice.link.holder)
                if await self._try(tracked, choice):
                    self.placed(choice.why)
                    return
        except Exception as error:
            self._detach(tracked)
            tracked.mailbox.fail(error)
        finally:
            tracked.placing = False

    async def _try(self, tracked: TrackedRequest, choice: Choice[ReplicaLink]) -> bool:
        """One attempt; whether the replica has taken the request and still has it."""
        link = choice.link
        attempt = tracked.next_attempt(choice.known)
        self._attach(tracked, link)
        try:
            await link.submit(attempt)
        except NotTaken as error:
            if tracked.link is link:  # it has said so; else the link was lost, which has counted
                self._detach(tracked)
                tracked.setback = str(error)
                link.doubt(str(error))
            return False
        except EngineBusy as error:
            self._detach(tracked)
            if not tracked.begun:
                raise  # nothing has begun: the client may come back
            tracked.setback = str(error)
            await asyncio.sleep(BUSY_SECONDS)
            return False
        tracked.taken = True
        return tracked.link is link

    async def _next_link(self, tracked: TrackedRequest, route: Route) -> Choice[ReplicaLink] | None:
        """The replica with least to do for it; None when the request has ended meanwhile.

        Raises EngineUnavailable when there is none in time.
        """
        while not tracked.mailbox.closed:
            changed, now = self._changed, time.monotonic()
            free = up = self._up()
            if tracked.losses >= SUSPICIOUS:
                free = [link for link in up if link.trial is None]
            if up and not free:
                # In line behind a trial, which ends soon, with a token or without.
                await changed.wait()
                tracked.deadline += time.monotonic() - now
                continue
            if now >= tracked.deadline:
                reason = tracked.setback or self.ready()[1]
                raise EngineUnavailable(f"no replica within {self._hold_s:g} s: {reason}")
            if free:
                return self._prefixes.choose(free, route)
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), tracked.deadline - now)
        return None

    def _up(self) -> list[ReplicaLink]:
        return [link for link in self._links.values() if link.state == "up"]

    def _attach(self, tracked: TrackedRequest, link: ReplicaLink) -> None:
        tracked.link = link
        self._attempts[tracked.wire_id] = tracked
        link.requests.add(tracked)
        link.queued += tracked.queued
        if tracked.losses >= SUSPICIOUS:
            link.trial = tracked

    def _detach(self, tracked: TrackedRequest, abort: bool = False) -> None:
        """The present attempt is over for this side. abort: tell the replica."""
        link = tracked.link
        if link is None:
            return
        self._attempts.pop(tracked.wire_id, None)
        link.requests.discard(tracked)
        self._computed(tracked, link)
        tracked.link = None
        if abort:
            link.abort(tracked.wire_id)
        if link.leaving:
            self._notify()

    def _computed(self, tracked: TrackedRequest, link: ReplicaLink) -> None:
        """The attempt has brought a token, or has ended: it does not queue any more."""
        link.queued -= tracked.queued
        tracked.queued = 0
        if link.trial is tracked:
            link.trial = None
            self._notify()

    def _move(self, tracked: TrackedRequest) -> None:
        if not tracked.placing and not tracked.mailbox.closed:
            tracked.mover = asyncio.get_running_loop().create_task(self._place(tracked))

    # --- what links tell ------------------------------------------------------------------------

    def deliver(self, link: ReplicaLink, output: TokenOutput) -> None:
        tracked = self._attempts.get(output.request_id)
        if tracked is None:
            return  # of an attempt that was given up
        if output.lost or output.finish_reason == "abort":
            if output.lost:
                link.doubt(output.error or "its engine has failed")
            self._lose(tracked, f"{link.seat}: {output.error or 'the replica aborted it'}")
            return
        if tracked.queued and output.token_ids:
            self._computed(tracked, link)
        tracked.receive(output)
        if output.finish_reason is not None:
            self._detach(tracked)

    def lost(self, link: ReplicaLink, reason: str) -> None:
        for tracked in list(link.requests):
            self._lose(tracked, reason)

    def link_changed(self, link: ReplicaLink) -> None:
        up = bool(self._up())
        if self._some_up and not up:
            self._none_up_since = time.monotonic()
        self._some_up = up
        self._notify()

    def _lose(self, tracked: TrackedRequest, reason: str) -> None:
        # Whoever was only silent must not go on computing it.
        self._detach(tracked, abort=True)
        tracked.setback = reason
        tracked.losses += 1
        tracked.all_losses += 1
        if tracked.losses >= MOST_LOSSES or tracked.all_losses >= MOST_LOSSES_IN_ALL:
            _log.error("request %s is given up: %s", tracked.request.request_id, reason)
            tracked.mailbox.fail(
                EngineUnavailable(
                    f"given up, as {tracked.all_losses} replicas were lost while they had this "
                    f"request; the last: {reason}"
                )
            )
        self._move(tracked)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the directory --------------------------------------------------------------------------

    async def _follow(self) -> None:
        """What is known stays in use while the directory cannot be read: requests can be served
        without it."""
        while True:
            try:
                self._apply(await self._read_directory(self._directory.version))
            except Exception as error:
                _log.warning("the mesh's directory cannot be read: %s", first_line(error))
                if self._directory.version < 0:
                    self._directory = Directory(version=-1, reason=first_line(error))
                await asyncio.sleep(replica_link.LOOK_SECONDS)

    def _apply(self, directory: Directory) -> None:
        self._directory = directory
        names = {name for _, name in directory.replicas}
        for name in self._links.keys() - names:
            link = self._links.pop(name)
            link.leaving = True
            self.link_changed(link)
            self._leaving[link] = asyncio.get_running_loop().create_task(self._drain(link))
        for seat, name in directory.replicas:
            if name not in self._links:
                link = ReplicaLink(seat, partial(self._find_actor, name), self)
                self._links[name] = link
                link.start()
        self._notify()

    async def _drain(self, link: ReplicaLink) -> None:
        """See the module's text. Ends the link when it has nothing left."""
        deadline = time.monotonic() + self._drain_s
        while link.requests:
            changed = self._changed
            left = deadline - time.monotonic()
            if left <= 0 and self._up():
                for tracked in list(link.requests):
                    self._detach(tracked, abort=True)
                    self._move(tracked)
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left if left > 0 else None)
        await link.stop()
        self._leaving.pop(link, None)
