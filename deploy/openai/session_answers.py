"""What /v1/sessions takes and gives, as /openapi.json describes it."""

from typing import Annotated, Literal

from pydantic import Field

from expertmesh.deploy.openai.answers import Answer, Count
from expertmesh.deploy.openai.fields import SessionId
from expertmesh.deploy.openai.protocol import Strict


class Nothing(Strict):
    """A body without fields; no body at all is as good."""


class ForkRequest(Strict):
    """POST /v1/sessions/{id}/fork. session_id: of the new session."""

    session_id: SessionId


class SessionCard(Answer):
    """tokens: of the conversation; saved_tokens: those whose state is saved, so that a request
    that begins with them does not compute them. seed: what the last answer was drawn with.
    expires: when it is dropped unless somebody uses it."""

    id: str
    object: Literal["session"]
    status: Literal["active", "suspended"]
    tokens: Count
    saved_tokens: Count
    pages: Count
    kv_mode: str
    seed: int | None
    created: int
    used: int
    expires: int


class SessionDetails(SessionCard):
    """resident: bytes in each tier that has them (hot: the device), the same ones perhaps in
    several. missing: pages and snapshots of the session that are nowhere, and will be computed
    again."""

    resident: dict[str, Count]
    missing: Count


class SessionList(Answer):
    object: Literal["list"]
    data: list[SessionCard]


class SessionSuspended(Answer):
    """bytes: of its state, before packing, on disk and synced when this is answered."""

    id: str
    object: Literal["session.suspended"]
    tokens: Count
    pages: Count
    bytes: Count
    seconds: Annotated[float, Field(ge=0)]


class SessionResumed(Answer):
    """restored_tokens: whose state is in memory, verified. recomputed_tokens: of the session, to be
    computed again by the next request. tier: the lowest that was read; empty when nothing was
    restored. reason: why not everything was."""

    id: str
    object: Literal["session.resumed"]
    restored_tokens: Count
    recomputed_tokens: Count
    tier: Literal["", "hot", "host", "disk"]
    bytes: Count
    load_ms: Annotated[float, Field(ge=0)]
    verify_ms: Annotated[float, Field(ge=0)]
    reason: str


class SessionDeleted(Answer):
    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]
