"""/openapi.json for bodies that FastAPI does not parse and answers that it does not build.

The endpoints read and check their bodies by hand (limits first, one error envelope) and write their
answers as bytes, so FastAPI knows nothing of either; what they take and give is told here.
"""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from expertmesh.deploy.openai.answers import ErrorAnswer

_REF = "#/components/schemas/{model}"
_JSON, _STREAM = "application/json", "text/event-stream"

# Statuses of a failure, beside those of the endpoint: the edge may answer them to anything.
_ANYWHERE = (401, 403, 500, 503)
BODY = (400, 408, 413, 415)
GENERATION = (*BODY, 404, 429, 504)

_REQUEST_ID = {
    "X-Request-Id": {
        "required": True,
        "description": "The request's own header, or its request_id, or a new one.",
        "schema": {"type": "string"},
    }
}
_SALT = {
    "name": "X-Cache-Salt",
    "in": "header",
    "description": "As cache_salt in a request's body; where both are given, they must be equal.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 256},
}
_RETRY_AFTER = {
    "Retry-After": {
        "description": "Seconds after which the same request may succeed.",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    }
}
_REASONS = {
    400: "The request can not be served as it is; `param` names the field.",
    401: "No valid API key.",
    403: "Not from here, or not with this key.",
    404: "No such model or path.",
    408: "The body did not arrive in time.",
    409: "Not as things stand; the message says what stands in the way.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many requests; Retry-After says when.",
    500: "A fault of the server.",
    503: "Nothing can serve this now; Retry-After says when.",
    504: "The answer took longer than the server allows.",
}


class Described:
    """Collects the models that a document refers to. One per app."""

    def __init__(self) -> None:
        self._models: set[type[BaseModel]] = {ErrorAnswer}

    def operation(
        self,
        answer: type[BaseModel] | None,
        *,
        body: type[BaseModel] | None = None,
        chunk: type[BaseModel] | None = None,
        media_type: str | None = None,
        errors: tuple[int, ...] = (),
        salted: bool = False,
    ) -> dict[str, Any]:
        """The `openapi_extra` of an endpoint.

        answer: of status 200, as JSON; None for an empty one, or for text of `media_type`.
        chunk: of each event when the request asks for a stream. salted: it takes the header that
        tells apart what a tenant has cached.
        """
        content: dict[str, Any] = {}
        if answer is not None:
            content[_JSON] = {"schema": self._reference(answer)}
        if chunk is not None:
            content[_STREAM] = {"schema": _event(self._reference(chunk))}
        if media_type is not None:
            content[media_type] = {"schema": {"type": "string"}}
        good: dict[str, Any] = {"description": "Success", "headers": _REQUEST_ID}
        responses = {"200": good | ({"content": content} if content else {})}
        for status in sorted({*_ANYWHERE, *errors}):
            responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
        out: dict[str, Any] = {"responses": responses}
        if salted:
            out["parameters"] = [_SALT]
        if body is not None:
            schema = {"schema": self._reference(body)}
            out["requestBody"] = {"required": True, "content": {_JSON: schema}}
        return out

    def _reference(self, model: type[BaseModel]) -> dict[str, Any]:
        self._models.add(model)
        return _to(model)

    def install(self, app: FastAPI) -> None:
        """Make /openapi.json of `app` hold the definitions."""
        models = sorted(self._models, key=lambda model: model.__name__)
        _, schemas = models_json_schema(
            [(model, "validation") for model in models], ref_template=_REF
        )
        generate = app.openapi

        def openapi() -> dict[str, Any]:
            document = generate()
            document["components"] = {
                "schemas": schemas["$defs"],
                "responses": {str(status): _error(status) for status in _REASONS},
            }
            for path in document["paths"].values():
                for operation in path.values():
                    # FastAPI's own idea of a wrong parameter. Ours is 404.
                    operation["responses"].pop("422", None)
            return document

        app.openapi = openapi  # type: ignore[method-assign]


def _to(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF.format(model=model.__name__)}


def _error(status: int) -> dict[str, Any]:
    return {
        "description": _REASONS[status],
        "headers": _REQUEST_ID | (_RETRY_AFTER if status in (429, 503) else {}),
        "content": {_JSON: {"schema": _to(ErrorAnswer)}},
    }


def _event(chunk: dict[str, Any]) -> dict[str, Any]:
    """One server-sent event, as readers of streams see it. The last one is [DONE]."""
    data = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [chunk, _to(ErrorAnswer)]},
    }
    done = {"type": "string", "const": "[DONE]"}
    return {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [done, data]}},
    }
