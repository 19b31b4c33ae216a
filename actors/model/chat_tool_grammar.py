"""The arguments of a tool call in K3's format, as a grammar made of the tool's JSON schema.

Each argument is an element of its own, with a type in its tag; a string's text stands there raw, a
value of any other type as JSON. So an object schema is taken apart into properties, and a property
into alternatives by type. What cannot be taken apart (allOf, patterns of raw text, references out
of a property) is written as one `json` element, the format's other form, under the whole schema:
nothing of a schema is ignored in either form.

Properties come in the schema's order. One that the schema does not name comes only where it names
none.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from expertmesh.actors.constraint.grammars import Part, any_of, literal, resolve, schema_part
from expertmesh.actors.constraint.spec import MAX_TEXT, ConstraintError
from expertmesh.actors.model import chat_xtml

Schema = dict[str, Any]

# Written for readers; they do not restrict a value.
_NOTES = {
    "title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
    "writeOnly", "$defs", "definitions", "$schema", "$id",
}  # fmt: skip
_OBJECT = {"type", "properties", "required", "additionalProperties", "strict"} | _NOTES
_STRING = {"type", "minLength", "maxLength"} | _NOTES
_TYPES = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean",
    "null": "null", "object": "object", "array": "array",
}  # fmt: skip
_LOCAL = ("#/$defs/", "#/definitions/")
_MAX_KEY = 256  # characters; a tag has a limited length
_MAX_DEPTH = 16  # of references and unions within one property
_MOST_ALTERNATIVES = 64  # of one property

QUOTE = '"'
OPEN, CLOSE, SEP = chat_xtml.OPEN, chat_xtml.CLOSE, chat_xtml.SEP


class _Whole(Exception):
    """This schema cannot be taken apart."""


@dataclass(slots=True)
class Rules:
    """Lark rules, and the JSON schemas that they name with `@`."""

    lines: list[str] = field(default_factory=list)
    parts: dict[str, Part] = field(default_factory=dict)
    _left: int = MAX_TEXT

    def part(self, name: str, schema: Schema) -> None:
        """Raises ConstraintError, also as soon as all parts together are too long."""
        part = self.parts[name] = schema_part(schema)
        self._left -= len(json.dumps(part, ensure_ascii=False))
        if self._left < 0:
            raise ConstraintError(f"makes more than {MAX_TEXT} characters of grammar")

    def add(self, name: str, body: str) -> None:
        self.lines.append(f"{name}: {body}")


def tag(text: str) -> str:
    """Lark of an opening tag."""
    return f"{OPEN} {literal(text)} {SEP}"


def end(name: str) -> str:
    """Lark of a closing tag."""
    return f"{CLOSE} {literal(name)} {SEP}"


_JSON = tag('json type="object"')


def any_arguments(rules: Rules, name: str) -> None:
    """A rule `name` for arguments of any names, types and texts."""
    head = f'{OPEN} "argument key=\\"" KEY "\\" type=\\"" TYPE "\\"" {SEP}'
    rules.add(name, f"({head} TEXT {end('argument')})*")


def typed_arguments(rules: Rules, name: str, schema: Schema | None) -> None:
    """A rule `name` for the arguments that a tool's `parameters` allow.

    Raises ConstraintError when the schema nests too deeply or is too long.
    """
    if schema is None:  # OpenAI: a function without parameters
        rules.add(name, '""')
        return
    try:
        properties = _properties(schema)
    except _Whole:
        rules.part(name, {"type": "object"} | schema)
        rules.add(name, f"{_JSON} @{name} {end('json')}")
        return
    if properties is None:
        _untyped(rules, name)
        return
    required, body = set(schema.get("required", ())), []
    for number, (key, alternatives) in enumerate(properties.items()):
        own, branches = f"{name}_{number}", []
        for branch, (kind, value) in enumerate(alternatives):
            if not isinstance(value, str):
                rules.part(f"{own}_{branch}", value)
                value = f"@{own}_{branch}"
            head = f'argument key="{chat_xtml.escape(key)}" type="{kind}"'
            branches.append(f"{tag(head)} {value} {end('argument')}")
        rules.add(own, " | ".join(branches))
        body.append(own if key in required else f"{own}?")
    rules.add(name, " ".join(body) or '""')


def _untyped(rules: Rules, name: str) -> None:
    """Arguments of any names, each with a value of the type that its tag says."""
    head = f'{OPEN} "argument key=\\"" KEY "\\" type=\\""'
    kinds = []
    for number, kind in enumerate(dict.fromkeys(_TYPES.values())):
        value = "TEXT"
        if kind != "string":
            value = f"@{name}_any_{number}"
            rules.part(value[1:], {"type": kind})
        kinds.append(f"{literal(kind + QUOTE)} {SEP} {value} {end('argument')}")
    rules.add(name, f"({head} ({' | '.join(kinds)}))*")


def _properties(schema: Schema) -> dict[str, list[tuple[str, str | Schema]]] | None:
    """By property its alternatives: a type, and Lark of raw text or the schema of a JSON value.
    None: the schema names no property and allows any."""
    open_ended = schema.get("additionalProperties", True)
    members = schema.get("properties", {})
    if (
        schema.keys() - _OBJECT
        or schema.get("type", "object") != "object"
        or not isinstance(members, dict)
        or open_ended not in (True, False, {})
        or any(not target.startswith(_LOCAL) for target in _references(schema))
    ):
        raise _Whole
    if "properties" not in schema and open_ended is not False:
        if schema.get("required"):
            raise _Whole
        return None
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise _Whole
    if any(key not in members for key in required):
        raise _Whole
    shared: Schema = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = {}
    for key, member in members.items():
        if len(key) > _MAX_KEY:
            raise _Whole
        found[key] = [
            (kind, value if isinstance(value, str) else _with(value, shared))
            for kind, value in _alternatives(member, shared, 0)
        ]
    return found


def _with(schema: Schema, shared: Schema) -> Schema:
    """With what it refers to."""
    return schema if next(_references(schema), None) is None else schema | shared


def _alternatives(schema: Any, shared: Schema, depth: int) -> list[tuple[str, str | Schema]]:
    if depth > _MAX_DEPTH or not isinstance(schema, dict | bool) or schema is False:
        raise _Whole
    keys = set() if schema is True else schema.keys() - _NOTES
    if schema is True or not keys:
        return [
            (kind, "TEXT" if kind == "string" else {"type": kind})
            for kind in dict.fromkeys(_TYPES.values())
        ]
    for union in ("anyOf", "oneOf"):
        if keys == {union} and isinstance(schema[union], list):
            found = _joined(schema[union], shared, depth)
            if union == "oneOf" and len({kind for kind, _ in found}) < len(found):
                raise _Whole  # the branches may overlap: the compiler will see
            return found
    if keys == {"$ref"} and isinstance(schema["$ref"], str):
        return _alternatives(resolve(schema["$ref"], shared), shared, depth + 1)
    if "const" in keys and keys <= {"const", "type"}:
        return _values([schema["const"]])
    if "enum" in keys and keys <= {"enum", "type"} and isinstance(schema["enum"], list):
        return _values(schema["enum"])
    kinds = schema.get("type")
    if isinstance(kinds, list) and kinds:
        return _joined((schema | {"type": kind} for kind in kinds), shared, depth)
    if not isinstance(kinds, str):
        raise _Whole
    if kinds == "string":
        return [("string", _raw_text(schema))]
    # An unknown type goes to the compiler, which says what is wrong with it.
    return [(_TYPES.get(kinds, "object"), schema)]


def _joined(branches: Iterable[Any], shared: Schema, depth: int) -> list[tuple[str, str | Schema]]:
    """Of all branches. Unions of unions are many times their text, so there is a limit."""
    found: list[tuple[str, str | Schema]] = []
    for branch in branches:
        found += _alternatives(branch, shared, depth + 1)
        if len(found) > _MOST_ALTERNATIVES:
            raise _Whole
    if not found:
        raise _Whole  # a union of nothing: the compiler will say so
    return found


def _values(values: list[Any]) -> list[tuple[str, str | Schema]]:
    texts = [value for value in values if isinstance(value, str)]
    found: list[tuple[str, str | Schema]] = [("string", any_of(texts))] if texts else []
    others: dict[str, list[Any]] = {}
    for value in values:
        if not isinstance(value, str):
            others.setdefault(_type_of(value), []).append(value)
    found += [(kind, {"enum": group}) for kind, group in others.items()]
    if not found:
        raise _Whole
    return found


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "object" if isinstance(value, dict) else "array"


def _raw_text(schema: Schema) -> str:
    if schema.keys() - _STRING:
        raise _Whole
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if not low and high == "":
        return "TEXT"
    if type(low) is not int or (high != "" and (type(high) is not int or high < low)) or low < 0:
        raise _Whole
    return f"/(?s:.{{{low},{high}}})/"


def _references(value: Any) -> Iterator[str]:
    level = [value]
    while level:
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if isinstance(item.get("$ref"), str):
                    yield item["$ref"]
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        level = deeper
