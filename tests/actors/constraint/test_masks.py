"""Masks against brute force: all texts of a small alphabet, judged by another implementation."""

import itertools
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jsonschema
import pytest

from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.grammars import compose, schema_part
from expertmesh.actors.constraint.spec import Constraint, ConstraintError
from expertmesh.actors.constraint.vocabulary import Vocabulary
from tests.support.constraints import allowed, grammars_of, matcher_of, small_vocabulary

ABC = small_vocabulary("a", "b", "c", "ab", "ba", "abc", "cc", "aaaa")
JSON = small_vocabulary(
    "1", "2", "-", "[", "]", ",", "12", "1,", "[]", "[1", "t", "rue", "null", '"', "é", "true]"
)
# Half characters: é is C3 A9, ê is C3 AA.
BYTES = Vocabulary([b"a", b"\xc3", b"\xa9", b"\xaa", b"a\xc3", b"<|end|>"], 5, [5])


def texts(alphabet: str, length: int) -> list[str]:
    return [
        "".join(letters)
        for size in range(length + 1)
        for letters in itertools.product(alphabet, repeat=size)
    ]


def regex(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


@cache
def json_texts() -> dict[str, Any]:
    """Every JSON text of a few pieces, with its value."""
    pieces = ["1", "2", "12", "-", "[", "]", ",", "true", "null", '"é"']
    found = {}
    for size in range(6):
        for parts in itertools.product(pieces, repeat=size):
            text = "".join(parts)
            with suppress(ValueError):
                found[text] = json.loads(text)
    return found


def check(vocabulary: Vocabulary, constraint: Constraint, language: set[bytes], depth: int) -> None:
    """At each prefix of the language that tokens can reach: a token may come if and only if some
    text of the language goes on so; the end, if and only if the prefix is one."""
    grammars = grammars_of(vocabulary)
    (end,) = vocabulary.end_ids
    prefixes = {text[:size] for text in language for size in range(len(text) + 1)}
    level: dict[bytes, list[int]] = {b"": []}
    seen: set[bytes] = set()
    for _ in range(depth):
        deeper: dict[bytes, list[int]] = {}
        for prefix, tokens in level.items():
            seen.add(prefix)
            mask = allowed(grammars.matcher(constraint, tokens).result(), vocabulary)
            expected = {
                token
                for token in range(vocabulary.ordinary)
                if prefix + vocabulary.tokens[token] in prefixes
            }
            expected |= {end} if prefix in language else set()
            assert mask == expected, (constraint, prefix)
            for token in expected - {end}:
                deeper.setdefault(prefix + vocabulary.tokens[token], [*tokens, token])
        level = {prefix: tokens for prefix, tokens in deeper.items() if prefix not in seen}
    assert not level, "depth is too small for the language"


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "ab|ba",
        "(ab){0,2}c?",
        "a{0,3}b{1,2}",
        "[ab]{2}c*",
        "(a|ab)(c|bcc)",
        "(?:abc|a.c)",
        "",
        "c*",
    ],
)
def test_regex(pattern: str) -> None:
    short = pattern.replace("*", "{0,3}")  # all texts must be among those that are looked at
    language = {t.encode() for t in texts("abc", 6) if regex(short)(t)}
    check(ABC, Constraint("regex", short), language, 8)


@pytest.mark.parametrize(
    "choices", [["a"], ["ab", "abc", "b"], ["", "cc"], ["aaaa", "aaab", "aab"]]
)
def test_choice(choices: list[str]) -> None:
    language = {choice.encode() for choice in choices}
    check(ABC, Constraint("choice", json.dumps(choices)), language, 8)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: pair | "c"\npair: "a" inner "b"\ninner: "c" | pair2\npair2: "a" "c" "b"',
        'root ::= "c" | "a" inner "b"\ninner ::= "c" | "a" "c" "b"',
    ],
    ids=["lark", "gbnf"],
)
def test_grammar(grammar: str) -> None:
    check(ABC, Constraint("grammar", grammar), {b"c", b"acb", b"aacbb"}, 8)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -2, "maximum": 21},
        {"type": "array", "items": {"enum": [1, 12, True]}, "maxItems": 2},
        {"enum": [1, 12, None, "é", [1]]},
        {"const": [True]},
        {"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 1, "maximum": 2}]},
        {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False,
         "minItems": 2},
    ],
)  # fmt: skip
def test_json_schema(schema: Any) -> None:
    judge = jsonschema.Draft202012Validator(schema)
    language = {text.encode() for text, value in json_texts().items() if judge.is_valid(value)}
    check(JSON, Constraint("json_schema", json.dumps(schema)), language, 9)


def test_choices_of_any_characters() -> None:
    choices = [
        "a.c",
        "a\\d",
        "(x|y)*",
        "[^a]{2}$",
        "a/b",
        '"q"',
        "#~&&-",
        "two\nlines",
        " ",
        "é\t\0",
    ]
    vocabulary = small_vocabulary(*sorted({char for choice in choices for char in choice}))
    constraint = Constraint("choice", json.dumps(choices))
    check(vocabulary, constraint, {choice.encode() for choice in choices}, 12)


def test_json_is_compact_or_indented() -> None:
    vocabulary = small_vocabulary(*'{}":,a1 \n\t')
    constraint = Constraint("json_schema", "{}")
    grammars = grammars_of(vocabulary)
    schema = Constraint("json_schema", json.dumps({"const": {"a": {"a": 1}}}))
    value = {"a": {"a": 1}}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")),
                 json.dumps(value, indent=2), json.dumps(value, indent="\t")):  # fmt: skip
        tokens = [vocabulary.tokens.index(char.encode()) for char in text]
        for one in (constraint, schema):
            assert vocabulary.end_ids[0] in allowed(
                grammars.matcher(one, tokens).result(), vocabulary
            )
    spaces = [vocabulary.tokens.index(char.encode()) for char in "{\n\n"]
    with pytest.raises(ConstraintError):
        grammars.matcher(constraint, spaces).result()


def test_a_union_within_itself() -> None:
    """[[[1]]] and so on: each level is one of two, which exclude each other."""
    branches = [{"type": "integer"}, {"$ref": "#/$defs/v"}]
    nested = {"type": "array", "items": {"oneOf": branches}, "minItems": 1, "maxItems": 1}
    schema = {"$ref": "#/$defs/v", "$defs": {"v": nested}}
    vocabulary = small_vocabulary("1", "[", "]")
    matcher = matcher_of(vocabulary, Constraint("json_schema", json.dumps(schema)))
    matcher.accept([1, 1, 1, 1])
    assert allowed(matcher, vocabulary) == {0, 1}
    matcher.accept([0, 2, 2, 2, 2])
    assert allowed(matcher, vocabulary) == set(vocabulary.end_ids)


@pytest.mark.parametrize("branches", [2, 400])
def test_written_out_schemas_are_bounded(branches: int) -> None:
    """Each level refers to the next one several times."""
    levels = {f"a{i}": {"oneOf": [{"$ref": f"#/$defs/a{i + 1}"}] * branches} for i in range(30)}
    big = {"anyOf": [{"const": i} for i in range(900)]}
    schema = {"$ref": "#/$defs/a0", "$defs": levels | {"a30": big}}
    text = json.dumps(schema_part(schema))
    assert len(text) < 10 * len(json.dumps(schema)) + (1 << 20)


def test_half_characters() -> None:
    check(BYTES, Constraint("regex", "aé|ê"), {"aé".encode(), "ê".encode()}, 5)


def test_special_tokens_are_no_text() -> None:
    """`<|mark|>` in a literal is eight characters; only the id of that name is the token."""
    vocabulary = small_vocabulary("<", "|mark|>", "a")
    mark = len(vocabulary.tokens) - 1
    literal = matcher_of(vocabulary, Constraint("regex", r"<\|mark\|>"))
    assert allowed(literal, vocabulary) == {0}
    named = matcher_of(vocabulary, compose('start: <|mark|> "a"'))
    assert allowed(named, vocabulary) == {mark}
    named.accept([mark])
    assert allowed(named, vocabulary) == {2}
    anything = matcher_of(vocabulary, Constraint("regex", "(?s:.*)"))
    assert mark not in allowed(anything, vocabulary)


def test_unwanted_ends_come_only_where_nothing_else_may() -> None:
    (end,) = ABC.end_ids
    matcher = matcher_of(ABC, Constraint("regex", "a{1,2}"))
    matcher.accept([0])
    assert allowed(matcher, ABC) == {0, end}
    assert allowed(matcher, ABC, frozenset({end})) == {0}
    assert allowed(matcher, ABC, frozenset({end, 0})) == {0, end}
    matcher.accept([0])
    assert allowed(matcher, ABC, frozenset({end})) == {end}


def test_a_token_that_may_not_come_is_an_error() -> None:
    matcher = matcher_of(ABC, Constraint("regex", "ab"))
    with pytest.raises(ConstraintError):
        matcher.accept([2])
    with pytest.raises(ConstraintError):  # and it stays one
        allowed(matcher, ABC)


def test_a_vocabulary_that_cannot_spell_the_text() -> None:
    matcher = matcher_of(ABC, Constraint("regex", "a(d|e)"))
    matcher.accept([0])
    with pytest.raises(ConstraintError, match=r"^no t"):
        allowed(matcher, ABC)


def test_copies_are_independent_and_renewed() -> None:
    grammars = Grammars(ABC)
    constraint = Constraint("regex", "[abc]{3}")
    first, second = (grammars.matcher(constraint, [0]).result() for _ in range(2))
    first.accept([1, 2])
    assert allowed(first, ABC) == set(ABC.end_ids)
    assert allowed(second, ABC) == {0, 1, 2, 3, 4, 6}
    for _ in range(200):  # more than one compiled grammar gives away
        assert allowed(grammars.matcher(constraint, [0, 1]).result(), ABC) == {0, 1, 2}
