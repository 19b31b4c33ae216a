"""Field types of the request models: each says what it takes, and fails with a short reason."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

# Printable ASCII, bounded: a request's id goes back in headers and answers, and into logs.
USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")
# Part of a path (/v1/sessions/ID), which clients normalise: no slash, no leading dot.
SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
SESSION_ID_RULE = "must be 1 to 128 letters, digits and ._:@-, the first no sign"
_INTEGER = re.compile(r"-?[0-9]{1,19}")
INT64 = 2**63


class PathError(ValueError):
    """A ValueError below a field: `path` continues the field's own, as in `[3].text`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _integer_keys(value: Any) -> Any:
    """JSON object keys are strings; {"5": 1.0} means token 5."""
    if not isinstance(value, dict):
        raise ValueError("must be an object of token id to bias")
    out: dict[int, Any] = {}
    for key, bias in value.items():
        if not isinstance(key, int) and not _INTEGER.fullmatch(str(key)):
            raise PathError(f".{str(key)[:40]}", "keys must be token ids")
        if int(key) in out:  # "5" and "05": which of the two biases was meant?
            raise PathError(f".{key}", f"token {int(key)} is there twice")
        out[int(key)] = bias
    return out


def _usable_id(value: Any) -> Any:
    if isinstance(value, str) and not USABLE_ID.fullmatch(value):
        raise ValueError("must be 1 to 256 printable ASCII characters without spaces")
    return value


def _session_id(value: Any) -> Any:
    if isinstance(value, str) and not SESSION_ID.fullmatch(value):
        raise ValueError(SESSION_ID_RULE)
    return value


def _prompt(value: Any) -> Any:
    """One prompt or many, all text or all token ids, always returned as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of token ids, or a list of either")
    if not value:
        raise ValueError("must not be empty")
    if isinstance(value[0], int | float):  # float only to name the bad element
        _check_ids(value, "")
        return [value]
    kind = type(value[0])
    if kind is not str and kind is not list:
        raise PathError("[0]", "must be a string or a list of token ids")
    for position, item in enumerate(value):
        if type(item) is not kind:
            raise PathError(f"[{position}]", "must not mix strings and lists of token ids")
        if isinstance(item, list):
            _check_ids(item, f"[{position}]")
    return value


def _check_ids(ids: list[Any], path: str) -> None:
    """Exactly int: a bool is an int to isinstance, and 1.0 is not a token id."""
    for position, token in enumerate(ids):
        if type(token) is not int:
            raise PathError(f"{path}[{position}]", "token ids must be integers")


_TEXT = {"type": "string", "minLength": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_ONE_PROMPT = [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS]

Texts = Annotated[
    list[str],
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]}),
]
LogitBias = Annotated[
    dict[int, Annotated[float, Field(ge=-100, le=100)]],
    BeforeValidator(_integer_keys),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompt),
    WithJsonSchema({"anyOf": [*_ONE_PROMPT, {"type": "array", "items": _IDS, "minItems": 1}]}),
]
RequestId = Annotated[
    str,
    BeforeValidator(_usable_id),
    Field(min_length=1, max_length=256),
    WithJsonSchema({"type": "string", "pattern": f"^{USABLE_ID.pattern}$"}),
]
SessionId = Annotated[
    str,
    BeforeValidator(_session_id),
    WithJsonSchema({"type": "string", "pattern": f"^{SESSION_ID.pattern}$"}),
]
Seed = Annotated[int, Field(ge=-INT64, lt=INT64)]
TokenCount = Annotated[int, Field(ge=0, lt=INT64)]
