"""The API's failures as gRPC statuses, with details that programs can read."""

from collections.abc import Callable

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from expertmesh.deploy.openai.errors import ApiError

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
DOMAIN = "expertmesh"
# Message and details are headers, of which clients take 8 KiB by default and else report a
# failure of the transport. The message is in there twice: percent-encoded, and in base64.
_MESSAGE_BYTES = 1500

Trailers = tuple[tuple[str, str | bytes], ...]


def code_of(error: ApiError) -> grpc.StatusCode:
    """INTERNAL for what is no client's and no engine's fault."""
    return _CODES.get(error.status, grpc.StatusCode.INTERNAL)


def status_of(error: ApiError, field: Callable[[str], str] = str) -> tuple[
    grpc.StatusCode, str, Trailers
]:  # fmt: skip
    """(code, message, trailing metadata) for `context.abort`. field: a parameter of the HTTP API
    as the .proto calls it."""
    code = code_of(error)
    text = error.message
    name = None if error.param is None else field(error.param)
    if name is not None and error.param != name:
        text = text.replace(f"'{error.param}'", f"'{name}'")
    text = clip(text)
    details: list[message.Message] = [
        error_details_pb2.ErrorInfo(reason=(error.code or "error").upper(), domain=DOMAIN)
    ]
    if name is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=clip(name, 300))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        delay = duration_pb2.Duration(seconds=error.retry_after)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    status = rpc_status.to_status(
        status_pb2.Status(code=code.value[0], message=text, details=packed)
    )
    trailers: list[tuple[str, str | bytes]] = list(status.trailing_metadata)
    if error.retry_after is not None:
        trailers.append(("retry-after", str(error.retry_after)))
    return code, text, tuple(trailers)


def clip(text: str, limit: int = _MESSAGE_BYTES) -> str:
    """As much of the text as stays within `limit` bytes once percent-encoded for a header."""
    size = 0
    for position, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        size += 1 if plain else 3 * len(character.encode("utf-8", "replace"))
        if size > limit:
            return text[:position] + "..."
    return text
