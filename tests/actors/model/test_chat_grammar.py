"""Constrained chat answers: whatever a grammar lets through is parsed, and keeps to the schemas."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import Vocabulary, vocabulary_of
from expertmesh.actors.model.chat import ChatError, ChatParser, ChatTurn, prepare_chat
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.actors.constraint.test_golden_models import NAMES, SCHEMAS
from tests.support.chat import USER, VOCAB, WEATHER, load_tokenizer
from tests.support.constraints import grammars_of, walk
from tests.support.tokenizers import special_names

END = special_names(VOCAB)["<|end_of_msg|>"]
YES = Constraint("regex", "yes|no", "structured_outputs.regex")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer, [END])


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return grammars_of(vocabulary)


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


def turn(tokenizer: Tokenizer, tools: Any = None, choice: Any = None, **more: Any) -> ChatTurn:
    return prepare_chat([USER], tools, more.pop("thinking", None), choice, tokenizer, **more)


class Parsed:
    """An answer as the front door reads it, token by token."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], thinking: bool, typed: bool) -> None:
        parser = ChatParser(tokenizer, thinking, typed=typed)
        deltas = [*[parser.push([token]) for token in ids], parser.finish()]
        self.reasoning = "".join(delta.reasoning for delta in deltas)
        self.content = "".join(delta.content for delta in deltas)
        self.calls: list[tuple[str, Any]] = []
        texts: dict[int, str] = {}
        names: dict[int, str] = {}
        for delta in deltas:
            for piece in delta.tool_calls:
                names.setdefault(piece.index, piece.name)
                texts[piece.index] = texts.get(piece.index, "") + piece.arguments
        self.calls = [(names[index], json.loads(text)) for index, text in texts.items()]


def some(
    grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer, made: ChatTurn, *,
    thinking: bool = False, count: int = 6, seed: int = 0,
) -> list[Parsed]:  # fmt: skip
    """Random answers of a turn."""
    assert made.constraint is not None
    rng = np.random.default_rng(seed)
    drawn = [walk(grammars, vocabulary, made.constraint, rng) for _ in range(count)]
    found = [Parsed(tokenizer, ids, thinking, made.typed) for ids in drawn if ids is not None]
    assert found
    return found


def test_free_answers_have_no_grammar(tokenizer: Tokenizer) -> None:
    for made in (turn(tokenizer), turn(tokenizer, [WEATHER]), turn(tokenizer, [WEATHER], "none"),
                 turn(tokenizer, [tool("f", {}, strict=True)], "none"),
                 turn(tokenizer, parallel=False)):  # fmt: skip
        assert made.constraint is None and made.schemas == []


@pytest.mark.parametrize("thinking", [None, "low"])
def test_the_response_is_constrained_and_thought_is_not(
    grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer, thinking: str | None
) -> None:
    made = turn(tokenizer, thinking=thinking, body=YES)
    assert made.schemas == [YES] and made.constraint is not None
    assert made.constraint.field == "structured_outputs.regex"
    answers = some(grammars, vocabulary, tokenizer, made, thinking=thinking is not None, count=12)
    assert {answer.content for answer in answers} == {"yes", "no"}
    assert any(answer.reasoning for answer in answers) == (thinking is not None)


def test_forced_calls(grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    tools = [WEATHER, tool("clock"), tool('a "b" & c', {"type": "object", "properties": {}})]
    names = {each["function"]["name"] for each in tools}
    made = turn(tokenizer, tools, "required")
    answers = some(grammars, vocabulary, tokenizer, made, count=16)
    assert all(answer.calls and not answer.content for answer in answers)
    assert {name for answer in answers for name, _ in answer.calls} == names
    assert any(len(answer.calls) > 1 for answer in answers)
    for answer in some(grammars, vocabulary, tokenizer, turn(tokenizer, tools, "required",
                                                             parallel=False)):  # fmt: skip
        assert len(answer.calls) == 1
    for name in names:
        named = {"type": "function", "function": {"name": name}}
        for answer in some(grammars, vocabulary, tokenizer, turn(tokenizer, tools, named), count=2):
            assert [called for called, _ in answer.calls] == [name]


def test_calls_may_be_limited_or_mixed_with_a_format(
    grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    answers = some(grammars, vocabulary, tokenizer, turn(tokenizer, [WEATHER], parallel=False),
                   count=12)  # fmt: skip
    assert {len(answer.calls) for answer in answers} == {0, 1}
    made = turn(tokenizer, [tool("clock")], body=YES)
    answers = some(grammars, vocabulary, tokenizer, made, count=16)
    for answer in answers:
        assert (answer.content in ("yes", "no")) == (not answer.calls)
    assert any(answer.calls for answer in answers)


ARGUMENTS: list[Any] = [
    None, {}, {"type": "object"}, {"type": "object", "properties": {}},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {"s": {"type": "string", "minLength": 1, "maxLength": 3}},
     "required": ["s"]},
    {"type": "object", "properties": {"a": {"type": ["integer", "null"]}, "b": {}, "c": True}},
    {"properties": {"e": {"enum": ["x", 1, None, [2], 2, "y/("]}, "k": {"const": "only"},
                    "n": {"const": ""}}, "required": ["e", "n"]},
    # Written whole: patterns, references to elsewhere, conditions on the object.
    {"type": "object", "properties": {"p": {"type": "string", "pattern": "^[ab]{2}$"}},
     "required": ["p"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"$ref": "#/properties/a"}},
     "required": ["b"], "additionalProperties": False},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
                "additionalProperties": False}]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 1},
    {"type": "object", "properties": {"u": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
                                      "v": {"format": "email", "type": "string"}},
     "required": ["u"], "additionalProperties": False},
    {"type": "object", "properties": {"w": {"oneOf": [{"const": "a"}, {"const": "b"}]}},
     "required": ["w"], "additionalProperties": False},
    # Shared definitions, optional values as pydantic writes them, a recursive one.
    {"type": "object", "properties": {
        "o": {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}], "default": None},
        "t": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}], "title": "T"}},
     "required": ["o", "t"],
     "$defs": {"P": {"type": "object", "properties": {"k": {"$ref": "#/$defs/P"}},
                     "additionalProperties": False}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ARGUMENTS, ids=str)
def test_arguments_keep_to_their_schema(
    grammars: Grammars, vocabulary: Vocabulary, tokenizer: Tokenizer, schema: Any
) -> None:
    for made in (turn(tokenizer, [tool("f", schema)], "required"),
                 turn(tokenizer, [tool("f", schema, strict=True)])):  # fmt: skip
        assert made.typed and made.constraint is not None
        for answer in some(grammars, vocabulary, tokenizer, made, count=5):
            for _, arguments in answer.calls:
                jsonschema.validate(arguments, schema or {"type": "object"})


@settings(max_examples=12)
@given(
    properties=st.dictionaries(NAMES, SCHEMAS, max_size=3),
    needed=st.lists(NAMES, max_size=2),
    seed=st.integers(0, 99),
)
def test_random_tools(
    grammars: Grammars,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    properties: dict[str, Any],
    needed: list[str],
    seed: int,
) -> None:
    required = [name for name in properties if name in needed]
    schema = {"type": "object", "properties": properties, "required": required,
              "additionalProperties": False}  # fmt: skip
    made = turn(tokenizer, [tool("f", schema)], "required", parallel=False)
    for answer in some(grammars, vocabulary, tokenizer, made, count=2, seed=seed):
        ((_, arguments),) = answer.calls
        jsonschema.validate(arguments, schema)


def test_what_is_compiled_apart_names_its_field(tokenizer: Tokenizer) -> None:
    broken = {"type": "object", "properties": {"a": {"type": "objec"}}}
    system = {"role": "system", "tools": [tool("late", broken, strict=True)]}
    made = prepare_chat([system, USER], [tool("f", {}), tool("g", broken)], None, "auto", tokenizer)
    assert [each.field for each in made.schemas] == ["messages[0].tools[0].function.parameters"]
    made = turn(tokenizer, [tool("f", {}), tool("g", broken)], "required", body=YES)
    assert [each.field for each in made.schemas] == [
        "structured_outputs.regex", "tools[0].function.parameters",
        "tools[1].function.parameters",
    ]  # fmt: skip


def test_schemas_that_nest_too_deeply_are_refused(tokenizer: Tokenizer) -> None:
    schema: Any = {}
    for _ in range(90):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    with pytest.raises(ChatError, match="deeper than 64") as caught:
        turn(tokenizer, [tool("g"), tool("f", schema)], "required", body=YES)
    assert caught.value.param == "tools[1].function.parameters"
    turn(tokenizer, [tool("f", schema)])  # free calls follow no schema


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": 5}}},
        {"type": "object", "properties": {}, "required": [[]]},
        {"type": "object", "properties": {"a": {"anyOf": []}}},
    ],
)
def test_what_is_no_schema_goes_to_the_compiler_whole(tokenizer: Tokenizer, schema: Any) -> None:
    made = turn(tokenizer, [tool("f", schema)], "required")
    assert made.constraint is not None
    parts = {part["name"]: part for part in json.loads(made.constraint.text)["grammars"]}
    assert parts["tool_0_arguments"]["json_schema"].items() >= schema.items()


def test_unions_of_unions_are_not_taken_apart(tokenizer: Tokenizer) -> None:
    levels: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 20} for i in range(7)
    }
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/a0"}},
        "$defs": levels | {"a7": {"type": "null"}},
    }
    made = turn(tokenizer, [tool("f", schema)], "required")
    assert made.constraint is not None
    (_, whole) = json.loads(made.constraint.text)["grammars"]
    assert whole["json_schema"]["properties"] == schema["properties"]


def test_definitions_go_where_they_are_used(tokenizer: Tokenizer) -> None:
    big = {"enum": list(range(10_000))}
    plain = {f"p{i}": {"type": "integer"} for i in range(50)}
    schema = {"type": "object", "properties": plain, "$defs": {"big": big}}
    assert turn(tokenizer, [tool("f", schema)], "required").constraint is not None
    uses = {name: {"type": "array", "items": {"$ref": "#/$defs/big"}} for name in plain}
    with pytest.raises(ChatError, match=r"tools\[0\]\.function\.parameters: .*262144"):
        turn(tokenizer, [tool("f", schema | {"properties": uses})], "required")


def test_the_48b_constrains_the_whole_answer(tmp_path: Path) -> None:
    other = load_tokenizer(tmp_path, "kimi_k2")
    made = prepare_chat([USER], None, "max", None, other, body=YES,
                        response_format={"type": "json_object"})  # fmt: skip
    assert made.constraint == YES and made.schemas == [YES]
    words = vocabulary_of(other, [special_names(VOCAB, "kimi_k2")["<|im_end|>"]])
    found = walk(grammars_of(words), words, YES, np.random.default_rng(0))
    assert found is not None and other.decode(found) in ("yes", "no")
