"""Who may call: every method needs a key where keys are set, but grpc.health.v1."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeAlias

import grpc
import grpc.aio

from expertmesh.deploy.auth.keys import ApiKey
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.errors import ApiError, bad
from expertmesh.deploy.rpc.methods import Context, Handler
from expertmesh.deploy.rpc.status import status_of

OPEN_SERVICE = "/grpc.health.v1.Health/"

# The key of the call that this task serves. Set before the call's handler runs.
CALLER: ContextVar[ApiKey | None] = ContextVar("expertmesh_grpc_caller", default=None)

Metadata = tuple[tuple[str, str | bytes], ...]
Find: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"


class Gate(grpc.aio.ServerInterceptor):
    """Deny by default: also what does not exist needs a key."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def intercept_service(
        self, continuation: Find, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        method = handler_call_details.method
        if method.startswith(OPEN_SERVICE):
            return await continuation(handler_call_details)
        metadata: Metadata = tuple(handler_call_details.invocation_metadata or ())
        try:
            CALLER.set(await self._front.authenticate(authorization(metadata)))
            check_ascii(metadata)
        except ApiError as error:
            return _refusing(error)
        return await continuation(handler_call_details)


def authorization(metadata: Metadata) -> str | None:
    """The one value of `authorization`; None when there is none, or more than one to choose of."""
    values = [value for key, value in metadata if key == "authorization"]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def check_ascii(metadata: Metadata) -> None:
    """Raises ApiError naming the key of a text value that no gRPC metadata can have: some proxies
    drop such values and some replace the characters, so a request must not depend on them."""
    for key, value in metadata:
        if not key.endswith("-bin") and not (isinstance(value, str) and value.isascii()):
            raise bad(f"the metadata '{key}' must be ASCII; bytes belong in '{key}-bin'")


def _refusing(error: ApiError) -> Handler:
    async def refuse(requests: Any, context: Context) -> None:
        await context.abort(*status_of(error))

    return grpc.stream_stream_rpc_method_handler(refuse)
