"""Tool-call arguments of a history: one JSON object (OpenAI) as a list of typed elements (K3).

The literal text of numbers, objects and arrays is kept: `1e2` stays `1e2`, because a re-serialised
history is a different prompt (k3-model.md 4.2, "prefer the newer behaviour"). What a model writes
goes the other way in chat_calls.py.
"""

import json
from dataclasses import dataclass
from typing import Any

_SPACE = " \t\n\r"
_TYPES = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


@dataclass(frozen=True, slots=True)
class Argument:
    """`type` is string|number|boolean|null|object|array; `text` is raw for strings, else JSON."""

    key: str
    type: str
    text: str


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Numbers stay text: nothing is converted, so no size limit and no rounding applies.
_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=str, parse_float=str)


def is_json(text: str) -> bool:
    """Whether text is one strict JSON value (NaN and Infinity are not)."""
    try:
        _DECODER.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def split_object(text: str) -> list[Argument] | None:
    """The members of a JSON object in order, or None when text is not one."""
    try:
        return _split(text)
    except (ValueError, IndexError, RecursionError):
        return None


def _split(text: str) -> list[Argument]:
    def skip(position: int) -> int:
        while text[position : position + 1] and text[position] in _SPACE:
            position += 1
        return position

    def expect(char: str, position: int) -> int:
        position = skip(position)
        if text[position] != char:
            raise ValueError(f"expected {char!r} at {position}")
        return skip(position + 1)

    members: list[Argument] = []
    at = expect("{", 0)
    while text[at] != "}":
        if members:
            at = expect(",", at)
        key, at = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key must be a string")
        begin = expect(":", at)
        value, end = _DECODER.raw_decode(text, begin)
        kind = _TYPES.get(text[begin], "number")
        members.append(Argument(key, kind, value if kind == "string" else text[begin:end]))
        at = skip(end)
    if skip(at + 1) != len(text):
        raise ValueError("text after the object")
    return members
