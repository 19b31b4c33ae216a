"""What crosses the border of a replica about sessions: calls in, views and reports out."""

import time
from typing import Literal

import msgspec

Verb = Literal["list", "show", "suspend", "resume", "fork", "delete"]
Problem = Literal[
    "unknown", "exists", "quota", "no_disk", "lost", "busy", "full", "timeout", "failed"
]  # fmt: skip


class SessionCall(msgspec.Struct, kw_only=True, frozen=True):
    """tenant, session: see GenerateRequest. target: the new session's name, for fork. at: when it
    was asked, by the clock that stamps requests; seconds since 1970."""

    verb: Verb
    tenant: str
    session: str = ""
    target: str = ""
    at: float = msgspec.field(default_factory=time.time)


class SessionView(msgspec.Struct, kw_only=True):
    """One session. status: suspended means that a copy on disk is complete and synced, for good.

    tokens: of the conversation, all handed out; position: how many of them are in the saved state.
    version: grows with every change, whichever replica makes it. expires: when it is dropped unless
    somebody uses it; seconds since 1970, as created and used. resident: bytes in each tier
    ("hot": the device), which may have the same ones: what "disk" has outlives the process; only
    show tells. missing: pages and snapshots of it that no tier of the replica has.
    """

    session_id: str
    status: Literal["active", "suspended"]
    tokens: int
    position: int
    pages: int
    kv_mode: str
    seed: int | None
    created: float
    used: float
    expires: float
    version: int
    resident: dict[str, int] = {}
    missing: int = 0


class ResumeReport(msgspec.Struct, kw_only=True):
    """What the next request of the session will find ready in memory.

    recomputed_tokens: those of the session that it will have to compute again. tier: the lowest one
    that was read ("" when nothing was restored), bytes: read from below the device and verified,
    verify_ms: time of the verification alone. reason: why not all was restored, "" when it was.
    """

    session_id: str
    restored_tokens: int
    recomputed_tokens: int
    tier: str
    bytes: int
    load_ms: float
    verify_ms: float
    reason: str = ""


class SuspendReport(msgspec.Struct, kw_only=True):
    """bytes: of pages, snapshot and manifest, before packing, that are on disk and synced now."""

    session_id: str
    tokens: int
    pages: int
    bytes: int
    seconds: float


class SessionAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One of the first five, by verb; or a problem with a message for whoever asked."""

    views: list[SessionView] | None = None
    view: SessionView | None = None
    suspended: SuspendReport | None = None
    resumed: ResumeReport | None = None
    deleted: str | None = None
    problem: Problem | None = None
    message: str = ""


class SessionProblem(Exception):
    """A call that cannot be met, with the kind of reason that callers tell apart."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(problem, message)
        self.problem, self.message = problem, message

    def __str__(self) -> str:
        return self.message

    def answer(self) -> SessionAnswer:
        return SessionAnswer(problem=self.problem, message=self.message)
