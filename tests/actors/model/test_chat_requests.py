"""Chat requests that must be refused, each with the path of its first bad value."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.chat import ChatError
from expertmesh.actors.model.chat_messages import parse_tools
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.support.chat import USER, WEATHER, Json, call, ids, load_tokenizer, refusal


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(tmp_path_factory.mktemp("k3"))


@pytest.mark.parametrize("effort", ["medium", "", "MAX"])
def test_unknown_efforts_are_refused(tokenizer: Tokenizer, effort: str) -> None:
    assert refusal(tokenizer, [USER], thinking=effort).param == "thinking_effort"


@pytest.mark.parametrize(
    "choice", ["banana", {}, [], 1, {"type": "function"}, {"function": {"name": "get_weather"}}]
)
def test_malformed_tool_choices_are_refused(tokenizer: Tokenizer, choice: Any) -> None:
    assert refusal(tokenizer, [USER], tools=[WEATHER], tool_choice=choice).param == "tool_choice"


def test_tool_choices_must_name_a_tool_of_the_request(tokenizer: Tokenizer) -> None:
    nope = {"type": "function", "function": {"name": "nope"}}
    error = refusal(tokenizer, [USER], tools=[WEATHER], tool_choice=nope)
    assert error.param == "tool_choice.function.name"
    for choice in ("auto", "required", nope):
        for tools in (None, []):
            error = refusal(tokenizer, [USER], tools=tools, tool_choice=choice)
            assert error.param == "tool_choice"
    assert ids(tokenizer, [USER], tool_choice="none") == ids(tokenizer, [USER])


NESTED: Any = []
for _ in range(20_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("param", "messages", "options"),
    [
        ("messages", None, {}),
        ("messages", [], {}),
        ("messages", {"role": "user"}, {}),
        ("messages[0]", ["hi"], {}),
        ("messages[0]", NESTED, {}),
        ("messages[1].role", [USER, {"content": "x"}], {}),
        ("messages[1].role", [USER, {"role": "wizard", "content": "x"}], {}),
        ("messages[0].role", [{"role": ["user"], "content": "x"}], {}),
        ("messages[0].content", [{"role": "user"}], {}),
        ("messages[0].content", [{"role": "user", "content": None}], {}),
        ("messages[0].content", [{"role": "user", "content": []}], {}),
        ("messages[0].content", [{"role": "user", "content": 5}], {}),
        ("messages[0].content", [{"role": "assistant", "content": None}], {}),
        ("messages[0].content[0]", [{"role": "user", "content": ["x"]}], {}),
        (
            "messages[0].content[1]",
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "see"},
                        {"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}},
                    ],
                }
            ],
            {},
        ),
        (
            "messages[0].content[0].text",
            [{"role": "user", "content": [{"type": "text", "text": {"a": 1}}] * 2000}],
            {},
        ),
        ("messages[0].name", [USER | {"name": 5}], {}),
        ("messages[0].tools", [USER | {"tools": [WEATHER]}], {}),
        ("messages[0].tool_calls", [USER | {"tool_calls": [call("f", "{}")]}], {}),
        ("messages[0].partial", [USER | {"partial": True}], {}),
        ("messages[0].?", [USER | {"\ud800": 1}], {}),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": "f"}], {}),
        ("messages[0].tool_calls[0].function", [{"role": "assistant", "tool_calls": [{}]}], {}),
        (
            "messages[0].tool_calls[0].function.name",
            [{"role": "assistant", "tool_calls": [call("", "{}")]}],
            {},
        ),
        (
            "messages[0].tool_calls[0].function.arguments",
            [{"role": "assistant", "tool_calls": [call("f", 5)]}],
            {},
        ),
        ("tools", [USER], {"tools": "f"}),
        ("tools[0]", [USER], {"tools": NESTED}),
        ("tools[0].type", [USER], {"tools": [{"function": {"name": "f"}}]}),
        ("tools[0].function", [USER], {"tools": [{"type": "function"}]}),
        ("tools[0].function.name", [USER], {"tools": [{"type": "function", "function": {}}]}),
        (
            "tools[0].function.parameters",
            [USER],
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        ),
        (
            "tools",
            [USER],
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"a": NESTED}}}
                ]
            },
        ),
        (
            "tools",
            [USER],
            {"tools": [{"type": "function", "function": {"name": "f", "x": float("nan")}}]},
        ),
        ("response_format.type", [USER], {"response_format": {"type": ""}}),
        ("response_format.type", [USER], {"response_format": {"type": "banana"}}),
        ("response_format.type", [USER], {"response_format": "json_object"}),
        (
            "response_format.json_schema.schema",
            [USER],
            {"response_format": {"type": "json_schema"}},
        ),
        (
            "response_format.json_schema.schema",
            [USER],
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": NESTED}}}},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_name_the_first_bad_value(
    tokenizer: Tokenizer, param: str, messages: Any, options: Json
) -> None:
    assert refusal(tokenizer, messages, **options).param == param


KEYS = st.sampled_from(
    ["role", "content", "name", "tools", "tool_calls", "tool_call_id", "function", "arguments",
     "type", "text", "parameters", "json_schema", "schema", "reasoning"]
)  # fmt: skip
WORDS = st.sampled_from(["user", "assistant", "tool", "system", "function", "text", "f", "{}", ""])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
NEAR_CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": st.just("f")}, optional={"arguments": ANY_JSON}
            )
        },
        optional={"id": ANY_JSON, "type": ANY_JSON},
    ),
    max_size=2,
)
NEAR_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": WORDS, "content": WORDS | ANY_JSON},
        optional={"tool_calls": NEAR_CALLS | ANY_JSON, "tool_call_id": WORDS, "tools": ANY_JSON},
    ),
    max_size=4,
)


@given(messages=NEAR_MESSAGES | ANY_JSON, tools=ANY_JSON, choice=ANY_JSON, wanted=ANY_JSON)
def test_any_json_is_rendered_or_refused(
    tokenizer: Tokenizer, messages: Any, tools: Any, choice: Any, wanted: Any
) -> None:
    for options in ({}, {"tools": tools, "tool_choice": choice, "response_format": wanted}):
        try:
            ids(tokenizer, messages, **options)
        except ChatError as error:
            str(error).encode()  # whatever came in, the message can be sent


def test_a_hundred_thousand_tools_are_read_in_linear_time() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(100_000)]
    assert len(parse_tools(tools)) == len(tools)
    with pytest.raises(ChatError, match=r"tools\[100000\]\.function\.name: .*twice"):
        parse_tools([*tools, tools[7]])
