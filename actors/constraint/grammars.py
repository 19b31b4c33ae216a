"""From a constraint to the text that llguidance compiles: a list of named grammars in JSON.

The first grammar of every list switches "forcing" off. With it, llguidance would offer only its own
tokenisation of text that is certain to come; without it the model chooses, as it was trained to.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from expertmesh.actors.constraint.spec import MAX_TEXT, Constraint, ConstraintError

HEADER = '%llguidance {"no_forcing": true}\n'
# Compact, with single spaces, or indented; were any run allowed, a model that likes spaces would
# never come to an end.
WHITESPACE = r"( |\r?\n[ \t]{0,40})?"
MAX_NESTING = 64
# The compiler counts in 64 bits, less some room. What reaches further is narrowed: every answer is
# still one that the schema allows.
LARGEST = 10**18
LONGEST = 10**6
# Containers that writing out references may add, to the whole schema.
MOST_WRITTEN = 10_000
# The converter from GBNF takes time in proportion to the square of its rules.
MOST_GBNF_RULES = 512
_UPPER, _LOWER = ("maximum", "exclusiveMaximum"), ("minimum", "exclusiveMinimum")
_COUNTS = ("maxLength", "maxItems", "maxProperties")
_FORMATS = {
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
}  # fmt: skip
_DATA = {"enum", "const", "default", "examples"}

_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")

# A grammar of a composed constraint: Lark text, or a JSON schema.
Part = str | dict[str, Any] | bool


def compose(start: str, **parts: Part) -> Constraint:
    """A composed constraint. `start`: Lark rules from `start:` on, in which `@name` is the part of
    that name. Raises ConstraintError when the whole is too long."""
    constraint = Constraint("composed", _named(start, parts))
    check_length(constraint.text)
    return constraint


def check_length(text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ConstraintError(f"has {len(text)} characters, at most {MAX_TEXT} are compiled")


def grammar_of(constraint: Constraint) -> str:
    """What LLMatcher takes. Raises ConstraintError; most mistakes show only when it compiles."""
    check_length(constraint.text)
    if constraint.kind == "composed":
        return constraint.text
    return _named("start: @text", {"text": part_of(constraint)})


def part_of(constraint: Constraint) -> Part:
    """The constraint as one grammar of a composed one. Raises ConstraintError."""
    text = constraint.text
    check_length(text)
    if constraint.kind == "json_schema":
        return schema_part(_json(text))
    if constraint.kind == "regex":
        return _regex(text)
    if constraint.kind == "choice":
        return one_of(_json(text))
    if constraint.kind == "grammar":
        return _lark(text)
    raise AssertionError("a composed constraint is no part of another")


def schema_part(schema: Any) -> Part:
    """A JSON schema with this module's rule of whitespace. Raises ConstraintError when it is no
    schema or nests too deeply for a recursive compiler."""
    if not isinstance(schema, dict | bool):
        raise ConstraintError("a JSON schema must be an object or a boolean")
    if _nesting(schema) > MAX_NESTING:
        raise ConstraintError(f"nests deeper than {MAX_NESTING} levels")
    if schema is False:
        raise ConstraintError("the schema `false` allows nothing")
    plain = {} if schema is True else _Preparation(schema).of(schema)
    return plain | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _regex(pattern: str) -> str:
    (grammar,) = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"]
    return str(grammar["lark_grammar"])


def any_of(texts: Sequence[str]) -> str:
    """A Lark terminal for any one of some strings.

    It is one regular expression: as rules, ten thousand of them would take seconds to compile.
    """
    if not any(texts):
        return '""'
    pattern = "|".join(_SPECIAL.sub(r"\\\g<0>", text) for text in texts)
    return _regex(pattern).removeprefix("start: ")


def one_of(choices: Any) -> str:
    """Lark for any one of some strings. Raises ConstraintError."""
    if not isinstance(choices, list) or not choices:
        raise ConstraintError("must be a non-empty list of strings")
    if not all(isinstance(choice, str) for choice in choices):
        raise ConstraintError("must be a list of strings only")
    return f"start: {any_of(choices)}"


def literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _named(start: str, parts: dict[str, Part]) -> str:
    grammars: list[dict[str, Any]] = [{"name": "answer", "lark_grammar": HEADER + start}]
    for name, part in parts.items():
        key = "lark_grammar" if isinstance(part, str) else "json_schema"
        grammars.append({"name": name, key: part})
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"is not JSON: {error}") from None


def _lark(text: str) -> str:
    if "::=" not in text:
        return text
    if (rules := text.count("::=")) > MOST_GBNF_RULES:
        raise ConstraintError(f"has {rules} rules, at most {MOST_GBNF_RULES} are read as GBNF")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # a converter in plain Python: anything may go wrong in it
        raise ConstraintError(f"is not GBNF: {' '.join(str(error).split())}") from None


def resolve(target: str, root: Any) -> Any:
    """What a reference within the document stands for; None when nothing is there."""
    found = root if target.startswith("#") else None
    for step in target.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found.get(step) if isinstance(found, dict) else None
    return found


class _Preparation:
    """A schema as the compiler can take it, allowing nothing that it does not allow: bounds within
    reach; no formats that are unknown, which are notes (JSON Schema, 7.2.3); branches of oneOf
    written out, or they could not be seen to exclude each other.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_WRITTEN

    def of(self, schema: Any, inside: frozenset[str] = frozenset()) -> Any:
        """inside: references that are being written out. Raises ConstraintError where a bound
        leaves nothing within reach."""
        if isinstance(schema, list):
            return [self.of(item, inside) for item in schema]
        if not isinstance(schema, dict):
            return schema
        found = {}
        for key, item in schema.items():
            if key in _DATA:
                found[key] = item
            elif key == "oneOf" and isinstance(item, list):
                # Within itself a union need not show once more that its branches exclude each
                # other: it does where it is written out.
                again = "anyOf" not in schema and any(_target(each) in inside for each in item)
                found["anyOf" if again else key] = [self._branch(each, inside) for each in item]
            else:
                found[key] = self.of(item, inside)
        if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
            del found["format"]
        _narrow(found)
        return found

    def _branch(self, branch: Any, inside: frozenset[str]) -> Any:
        """Written out, unless it is within itself or the whole becomes too large."""
        target = _target(branch)
        if target is not None and target not in inside and self._left > 0:
            found = resolve(target, self._root)
            self._left -= _containers(found)
            if self._left > 0 and isinstance(found, dict) and _nesting(found) < MAX_NESTING // 2:
                return self.of(found, inside | {target})
        return self.of(branch, inside)


def _target(branch: Any) -> str | None:
    """What the branch refers to, if it does nothing else."""
    found = branch["$ref"] if isinstance(branch, dict) and branch.keys() == {"$ref"} else None
    return found if isinstance(found, str) else None


def _narrow(schema: dict[str, Any]) -> None:
    """Bounds within reach, in place. Raises ConstraintError."""
    for key in _UPPER + _LOWER + _COUNTS:
        bound = schema.get(key)
        if isinstance(bound, bool) or not isinstance(bound, int | float):
            continue
        if key in _COUNTS:
            schema[key] = min(bound, LONGEST)
        elif abs(bound) > LARGEST:
            if (bound > 0) != (key in _UPPER):
                raise ConstraintError(f"{key} {bound} is beyond what can be followed, 10^18")
            schema[key] = LARGEST if bound > 0 else -LARGEST


def _containers(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + sum(map(_containers, value.values() if isinstance(value, dict) else value))


def _nesting(value: Any) -> int:
    """Levels of containers, counted level by level: recursion is what is being guarded."""
    depth, level = 0, [value]
    while level := [
        child
        for item in level
        if isinstance(item, dict | list)
        for child in (item.values() if isinstance(item, dict) else item)
    ]:
        depth += 1
        if depth > MAX_NESTING:
            break
    return depth
