"""An engine's sessions: what other threads ask about them, and what its requests do with them."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from expertmesh.actors.attention.messages import (
    EngineFailed,
    GenerateRequest,
    QuotaExceeded,
    RequestRefused,
)
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.errands import Errands
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall, SessionProblem
from expertmesh.actors.state.session_verbs import SessionVerbs
from expertmesh.actors.state.sessions import SWEEP_S, Sessions
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tip import Tip

_log = logging.getLogger(__name__)

# Sessions of another mode hold pages that the prefix cache does not know.
MODE = "exact"


class SessionDesk:
    """`ask` and `check` are for any thread, everything else for the engine's."""

    def __init__(self, cache: StateCache, store: Store, arrived: threading.Event) -> None:
        """arrived: the engine's, set when there is something to do."""
        self._cache, self._arrived = cache, arrived
        self._errands = Errands()
        self.sessions = Sessions(
            store,
            cache.device,
            cache.settings,
            self._errands,
            fingerprint=cache.fingerprint,
            layout=cache.state.layout,
        )
        self._refreshing = False
        self._verbs = SessionVerbs(self.sessions, self._errands)
        self._lock = threading.Lock()  # guards the next two
        self._calls: deque[tuple[SessionCall, Future[SessionAnswer]]] = deque()
        self._closed: str | None = None
        self._running: dict[str, GenerateRequest] = {}  # with a session, by id

    # --- any thread ---------------------------------------------------------------------------

    def ask(self, call: SessionCall) -> "Future[SessionAnswer]":
        """Raises EngineFailed, also out of the future."""
        answer: Future[SessionAnswer] = Future()
        with self._lock:
            if self._closed is not None:
                raise EngineFailed(self._closed)
            self._calls.append((call, answer))
        self._arrived.set()
        return answer

    def check(self, request: GenerateRequest) -> None:
        """Raises RequestRefused when its session can never be."""
        if not request.session:
            return
        if (request.kv_mode or self._cache.settings.kv_mode) != MODE:
            raise RequestRefused(f"a session needs kv_mode {MODE}", "session_id")
        if full := self.sessions.full(request.tenant, request.session):
            raise QuotaExceeded(full, "session_id")

    @property
    def count(self) -> int:
        """Sessions that live here or on the disk, as far as is known."""
        return len(self.sessions)

    # --- the engine's thread ------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        # Asked between all steps: what is seldom due comes before what counts tenants.
        due = self.sessions.sweep_due and self.patience is not None
        return bool(self._calls) or self._errands.ready or due

    @property
    def patience(self) -> float | None:
        """Seconds after which to look for work though nothing has arrived: time alone ends
        sessions, and loads that are held for them. None where there can be neither."""
        if self._closed is None and (self.sessions.durable or self.count):
            return SWEEP_S
        return None

    def work(self) -> None:
        """Takes calls, goes on with those whose loads and writes have ended. Never waits."""
        while self._calls:
            call, answer = self._calls.popleft()
            if answer.set_running_or_notify_cancel():
                if call.verb == "delete":
                    self._forget_turns(call)
                self._verbs.call(call, answer.set_result)
        self._errands.poll()
        if self.sessions.sweep_due:
            self.sessions.sweep()
            self._refresh()

    def _forget_turns(self, call: SessionCall) -> None:
        """A turn that was under way when its session was deleted does not bring it back: not here,
        whatever the clocks of front doors say, nor if it comes from elsewhere."""
        self.sessions.delete(call.tenant, call.session, call.at)
        for name, request in list(self._running.items()):
            if (request.tenant, request.session) == (call.tenant, call.session):
                del self._running[name]

    def _refresh(self) -> None:
        """What others have left on the disk counts against the quota and is pinned here."""

        def done(_: object) -> None:
            self._refreshing = False

        if not self._refreshing:
            self._refreshing = True
            self._errands.start(self.sessions.refresh(), done, done)

    def claim(self, request: GenerateRequest, done: Callable[[Tip | None], None]) -> None:
        """Calls `done`, now or from `work`, with where the request goes on."""
        if not request.arrived:
            request = msgspec.structs.replace(request, arrived=time.time())
        self._running[request.request_id] = request

        def failed(error: Exception) -> None:
            _log.warning("session %s is not used: %s", request.session, error)
            done(None)

        steps = self.sessions.claim(request.tenant, request.session, MODE, request.prompt_ids)
        self._errands.start(steps, done, failed)

    def leave(self, request_id: str) -> None:
        """The request has ended in a way that leaves its session as it was."""
        self._running.pop(request_id, None)

    def save(self, seq: Sequence) -> None:
        """Its answer is complete: the session goes on from here. Before its state is given back."""
        request = self._running.pop(seq.id, None)
        if request is None:
            return
        tip, items = self._cache.save_tip(seq)
        seed = None if seq.greedy else seq.seed
        self.sessions.save(
            request.tenant, request.session, MODE, seq.tokens, seed, tip, items, request.arrived
        )

    def close(self, reason: str) -> None:
        """Ends all calls, and takes none any more."""
        with self._lock:
            self._closed = self._closed or reason
            calls, self._calls = self._calls, deque()
        for _, answer in calls:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineFailed(reason))
        self._running.clear()
        self.sessions.hand_over()
        self._errands.close(SessionProblem("failed", reason))


class NoSessions:
    """Of an engine that keeps nothing below its device. Its methods are those of SessionDesk."""

    has_work, count, patience = False, 0, None

    def ask(self, call: SessionCall) -> "Future[SessionAnswer]":
        answer: Future[SessionAnswer] = Future()
        text = "this server keeps no sessions: it has neither host memory nor a disk for them"
        if call.verb == "list":
            answer.set_result(SessionAnswer(views=[]))
        else:
            answer.set_result(SessionProblem("unknown", text).answer())
        return answer

    def check(self, request: GenerateRequest) -> None:
        pass

    def work(self) -> None:
        pass

    def claim(self, request: GenerateRequest, done: Callable[[Tip | None], None]) -> None:
        done(None)

    def leave(self, request_id: str) -> None:
        pass

    def save(self, seq: Sequence) -> None:
        pass

    def close(self, reason: str) -> None:
        pass
