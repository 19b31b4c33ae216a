"""What other threads hand to an engine: requests, aborts, and the names that are in use."""

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineFailed,
    GenerateRequest,
    RequestRefused,
)
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.matcher import Matcher


@dataclass(frozen=True, slots=True)
class Compiled:
    """A request with what has become of its grammar; None: it was aborted meanwhile."""

    request: GenerateRequest
    matcher: "Future[Matcher] | None"


Post = GenerateRequest | Compiled | str


class Inbox:
    """Posts in the order they came; constrained requests once their grammar is compiled.

    arrived: set whenever there may be something to do. failed: why nothing is taken any more.
    names: of requests that have not ended, with when each was submitted.
    """

    def __init__(self, grammars: Grammars | None, arrived: threading.Event) -> None:
        self.arrived = arrived
        self.failed: str | None = None
        self.names: dict[str, float] = {}
        self._grammars = grammars
        self._lock = threading.Lock()  # guards all but `arrived`
        self._posts: deque[Post] = deque()
        self._compiling: dict[str, GenerateRequest] = {}

    def __bool__(self) -> bool:
        return bool(self._posts)

    # --- from any thread ----------------------------------------------------------------------

    def submit(self, request: GenerateRequest, running: int, most_waiting: int) -> None:
        """Raises RequestRefused, EngineBusy or EngineFailed, and then nothing of it remains."""
        constraint, grammars = request.constraint, self._grammars
        if constraint is not None and grammars is None:
            raise RequestRefused(
                "this checkpoint has no tokenizer, so no grammar can be followed", constraint.field
            )
        with self._lock:
            if self.failed is not None:
                raise EngineFailed(self.failed)
            if request.request_id in self.names:
                raise RequestRefused(
                    f"request id {request.request_id!r} is already in use", "request_id"
                )
            waiting = len(self.names) - running
            if waiting >= most_waiting:
                raise EngineBusy(f"{waiting} requests are waiting, at most {most_waiting} may")
            self.names[request.request_id] = perf_counter()
            if constraint is None:
                self._posts.append(request)
            else:
                self._compiling[request.request_id] = request
        if constraint is not None and grammars is not None:
            # In another thread, so that no step waits for it.
            matcher = grammars.matcher(constraint, request.resume_ids)
            matcher.add_done_callback(partial(self._compiled, request))
        else:
            self.arrived.set()

    def _compiled(self, request: GenerateRequest, matcher: "Future[Matcher]") -> None:
        with self._lock:
            if self._compiling.get(request.request_id) is not request:
                return  # aborted, or the engine has failed
            del self._compiling[request.request_id]
            self._posts.append(Compiled(request, matcher))
        self.arrived.set()

    def abort(self, request_id: str) -> None:
        """Unknown ids are ignored: the request may have ended by itself a moment ago."""
        with self._lock:
            if request_id not in self.names:
                return
            compiling = self._compiling.pop(request_id, None)
            self._posts.append(request_id if compiling is None else Compiled(compiling, None))
        self.arrived.set()

    def requests(self) -> list[GenerateRequest]:
        """Those that the engine has not looked at yet."""
        return [post for post in list(self._posts) if isinstance(post, GenerateRequest)]

    # --- the stepping thread ------------------------------------------------------------------

    def take(self) -> Iterator[Post]:
        """Until it is empty, also of what comes meanwhile."""
        while self._posts:
            yield self._posts.popleft()

    def close(self, reason: str) -> list[str]:
        """Takes nothing any more, for the first reason given. The names that were in use."""
        with self._lock:
            self.failed = self.failed or reason
            names = list(self.names)
            self.names.clear()
            self._posts.clear()
            self._compiling.clear()
        return names
