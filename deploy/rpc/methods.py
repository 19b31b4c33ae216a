"""From a method of this server to what grpcio serves: bytes in, bytes out, and no failure without
a status that says what it is.

All methods are bidirectional streams to grpcio, whatever the .proto says: on the wire that is the
same, and only so does the server see a client that ends its side without a message (grpcio leaves
such a unary call open for ever) and bytes that are no such message (grpcio says INTERNAL).
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.body import HEAVY_BYTES
from expertmesh.deploy.openai.errors import ApiError, bad
from expertmesh.deploy.openai.run import api_error
from expertmesh.deploy.rpc.status import code_of, status_of

_log = logging.getLogger(__name__)

# grpcio's classes are generic in its stubs alone.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Request = TypeVar("Request", bound=Message)
Reply = Callable[[Message], Awaitable[None]]
# (request, reply, whether the request is so large that work on it belongs in a thread)
Method = Callable[[Request, Reply, bool], Awaitable[None]]
# From a client's clock to a call's first look at ours.
TRAVEL_SECONDS = 0.05
FieldName = Callable[[str, Request], str]


def http_name(param: str, request: Message) -> str:
    return param


def handler(
    front: Front,
    kind: type[Request],
    method: Method[Request],
    field: FieldName[Request] = http_name,
) -> Handler:
    """field: a parameter of an ApiError as the .proto calls it."""
    name = kind.__name__.removesuffix("Request")

    async def serve(requests: AsyncIterator[bytes], context: Context) -> None:
        ends_at = _end(context)
        code, request = grpc.StatusCode.OK, kind()
        try:
            data = await _first(requests, front.served.limits.upload_seconds)
            heavy = data is not None and len(data) > HEAVY_BYTES
            request = await asyncio.to_thread(parse, kind, data) if heavy else parse(kind, data)
            await method(request, _reply(context, front.edge.grpc.message_bytes), heavy)
        except asyncio.CancelledError:
            late = ends_at is not None and time.monotonic() >= ends_at
            code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            known = api_error(error)
            if known is None:
                _log.exception("%s failed", name)
                known = ApiError(500, "internal error")
            code = code_of(known)
            front.telemetry.failed(known)
            await context.abort(*status_of(known, lambda param: field(param, request)))
        finally:
            front.telemetry.grpc_finished(name, code.name)

    return grpc.stream_stream_rpc_method_handler(serve)


async def _first(requests: AsyncIterator[bytes], seconds: float) -> bytes | None:
    """The call's message; None when the client ends without one. Raises ApiError 408."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(aiter(requests), None)
    except TimeoutError:
        raise ApiError(408, f"the message did not arrive within {seconds:g} s") from None


def parse(kind: type[Request], data: bytes | None) -> Request:
    """Raises ApiError for what is no such message: broken bytes, text not in UTF-8, nothing."""
    full_name = kind.DESCRIPTOR.full_name
    if data is None:
        raise bad(f"the call has no message; a {full_name} is expected")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise bad(f"the message is not a {full_name}: its bytes do not parse") from None


def _end(context: Context) -> float | None:
    """On this process's clock, when an end from outside is the client's deadline: its own clock
    began earlier, and the wire rounds the time left up by as much as 1 %."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + 0.99 * left - TRAVEL_SECONDS


def _reply(context: Context, limit: int) -> Reply:
    async def reply(message: Message) -> None:
        data = message.SerializeToString()
        if len(data) > limit:
            raise ApiError(
                413,
                f"the answer is a message of {len(data)} bytes, and at most {limit} are sent "
                "(grpc.message_bytes): ask for fewer tokens or log-probabilities, or for a stream",
                code="message_too_large",
            )
        await context.write(data)

    return reply
