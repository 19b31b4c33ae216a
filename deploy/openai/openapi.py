"""/openapi.json for bodies that FastAPI does not parse itself.

The endpoints read and check their bodies by hand (limits first, one error envelope), so FastAPI
knows nothing of them; the models' own schemas are put where readers of the document look.
"""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"


def request_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of an endpoint that takes `model` as JSON."""
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def add_definitions(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Make the references of `request_body` resolve."""
    definitions: dict[str, Any] = {}
    for model in models:
        schema = model.model_json_schema(ref_template=_REF)
        definitions |= schema.pop("$defs", {})
        definitions[model.__name__] = schema
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
