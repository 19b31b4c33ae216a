"""One request for as long as its client waits: what it asked for, what it got, where it runs."""

import asyncio
import secrets
from typing import TYPE_CHECKING

import msgspec

from expertmesh.actors.attention.messages import GenerateRequest, KvReport, TokenOutput
from expertmesh.deploy.mailbox import Mailbox

if TYPE_CHECKING:
    from expertmesh.deploy.replica_link import ReplicaLink


class TrackedRequest:
    """Everything that is needed to go on elsewhere when a replica is lost.

    Each attempt to have it served has an id of its own on the wire, so that what an abandoned one
    still says can be told apart. ids: the tokens received so far; they are the client's, whether
    or not it has read them. losses: attempts in a row that brought no token and ended because
    their replica was lost; all_losses: however much they brought. taken: whether a replica ever
    had it. setback: why the last attempt came to nothing. deadline: until when it waits for a
    replica, in monotonic seconds. read: how old tokens were read by earlier attempts, read_now: by
    the present one.
    """

    __slots__ = (
        "all_losses",
        "attempts",
        "deadline",
        "ids",
        "link",
        "losses",
        "mailbox",
        "mover",
        "placing",
        "queued",
        "read",
        "read_now",
        "request",
        "setback",
        "taken",
        "wire_id",
    )

    def __init__(self, request: GenerateRequest, mailbox: Mailbox) -> None:
        self.request, self.mailbox = with_seed(request), mailbox
        self.ids: list[int] = []
        self.link: ReplicaLink | None = None
        self.wire_id = ""
        self.attempts = self.losses = self.all_losses = 0
        self.taken, self.setback = False, ""
        self.queued = 0  # tokens to compute before the present attempt brings its first one
        self.deadline = 0.0
        self.placing = False  # whether somebody is looking for a replica for it
        self.mover: asyncio.Task[None] | None = None
        self.read: KvReport | None = None
        self.read_now: KvReport | None = None

    def next_attempt(self, known: int = 0) -> GenerateRequest:
        """The request as the next replica gets it: it goes on after what was received. known:
        tokens of the prompt that the replica has probably computed for others."""
        name = self.request.request_id
        self.wire_id = f"{name}~{self.attempts}" if self.attempts else name
        self.attempts += 1
        if self.read_now is not None:
            self.read, self.read_now = self.read_now.after(self.read), None
        self.queued = len(self.request.prompt_ids) - known + len(self.ids)
        return msgspec.structs.replace(
            self.request, request_id=self.wire_id, resume_ids=self.ids.copy()
        )

    def drop_session(self, tenant: str, session: str) -> None:
        """It was deleted: the next replica does not bring it back."""
        if (self.request.tenant, self.request.session) == (tenant, session):
            self.request = msgspec.structs.replace(self.request, session="")

    @property
    def begun(self) -> bool:
        """Whether some replica has, or may have, worked on it."""
        return self.taken or bool(self.all_losses)

    def receive(self, output: TokenOutput) -> None:
        output.request_id = self.request.request_id
        if output.token_ids:
            self.ids += output.token_ids
            self.losses = 0
        if output.kv is not None:
            self.read_now = output.kv
            output.kv = output.kv.after(self.read)
        self.mailbox.put(output)


def with_seed(request: GenerateRequest) -> GenerateRequest:
    """A sampled request draws from a seed that this side knows: a continuation must go on with
    the same numbers."""
    params = request.params
    if params.seed is not None or not params.temperature:
        return request
    params = msgspec.structs.replace(params, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, params=params)
