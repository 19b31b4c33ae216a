"""One error shape for every failure: `{"error": {message, type, param, code}}`.

The official clients read only this envelope (a flat body or FastAPI's 422 `detail` leaves their
fields empty), and inside a stream only `data: {"error": ...}` raises; anything else looks like a
short but complete answer.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.responses import Response

# What a message may echo of the input. Unbounded echo turned a 4 KB request into a 23 MB answer
# elsewhere (vllm-project/vllm#49239).
MESSAGE_LIMIT = 1000
ECHO_LIMIT = 80

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "rate_limit_exceeded",
    431: "headers_too_large",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout",
}
# Of who has all the sessions it may have.
QUOTA = "session_quota_exceeded"
# Codes of 429 for a key that is beyond its own limits; the server may be idle.
KEY_LIMITS = frozenset(
    {
        "requests_in_flight_exceeded", "requests_per_minute_exceeded",
        "tokens_per_minute_exceeded", QUOTA,
    }
)  # fmt: skip


# How pydantic's messages begin: "Input should be ...", "String should have ...".
_SHOULD = re.compile(r"^[A-Z][a-z]+ should ")


class ApiError(Exception):
    """A failure with its place in the envelope. `param` names the offending request field."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MESSAGE_LIMIT else message[:MESSAGE_LIMIT] + "..."
        self.param = None if param is None else echo(param, 200)
        self.code = code if code is not None else _CODES.get(status)
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def envelope(self) -> dict[str, Any]:
        body = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": body}

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        extra = dict(headers or {})
        if self.retry_after is not None:
            extra["retry-after"] = str(self.retry_after)
        if self.status == 401:
            extra["www-authenticate"] = "Bearer"
        return Response(
            orjson.dumps(self.envelope()),
            status_code=self.status,
            headers=extra,
            media_type="application/json",
        )


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request can not be served as it is, whoever retries it."""
    return ApiError(400, message, param, code)


def unsupported(param: str, what: str) -> ApiError:
    """A 400 for a known feature that this server does not have, as opposed to a misspelt field."""
    return ApiError(400, f"{what} is not supported yet", param, "unsupported_parameter")


def unavailable(reason: str) -> ApiError:
    """A 503: the engine behind the front door can not take or finish the request now."""
    return ApiError(503, reason or "the engine is not available", retry_after=1)


def echo(value: object, limit: int = ECHO_LIMIT) -> str:
    """A bounded picture of something the client sent."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def from_validation(error: ValidationError) -> ApiError:
    """The first failure only, by its path: `messages[0].content[3].text: ...`."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = ""
    for part in first["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{echo(part)}" if path else echo(part)
    kind, message = first["type"], first["msg"]
    cause = first.get("ctx", {}).get("error")
    if kind == "value_error" and isinstance(cause, ValueError):
        message = str(cause)
        path += getattr(cause, "path", "")  # a PathError knows where below the field
    elif kind == "extra_forbidden":
        return bad(f"unknown field '{path}'", path, "unknown_parameter")
    elif kind == "missing":
        return bad(f"'{path}' is required", path, "missing_required_parameter")
    elif kind in ("model_type", "dict_type"):
        message = "must be an object"  # pydantic's text names our classes
    else:
        message = _SHOULD.sub("must ", message)
    return bad(f"'{path}': {message}" if path else message, path or None, "invalid_value")
