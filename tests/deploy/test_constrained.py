"""Constrained answers over a real engine with random weights: whatever such a model wants to say,
what comes out has the form that was asked for."""

import asyncio
import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.deploy.test_chat import both as both_chat
from tests.deploy.test_completions import both
from tests.support.door import Door
from tests.support.tokenizer_files import RANKS, SPECIALS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
OFF = {"chat_template_kwargs": {"thinking": False}}
MARKERS = {name: RANKS + offset for offset, name in SPECIALS.items()}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 20_000_000_000},
        "城市": {"enum": ["北京", "Köln", 7, None]},
        "🌡": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "城市", "🌡"],
    "additionalProperties": False,
}


def gather(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    """Completions sent at the same time; their texts in order."""

    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=120, verify=False) as client:
            posts = [client.post(COMPLETIONS, json={"model": "tiny"} | body) for body in bodies]
            answers = await asyncio.gather(*posts)
        return [answer.json()["choices"][0]["text"] for answer in answers]

    return asyncio.run(run())


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    holder = {"name": "x", "schema": schema} | more
    return {"response_format": {"type": "json_schema", "json_schema": holder}}


def test_json_schema(real: Door) -> None:
    body = schema_format(PERSON, strict=True) | {"max_tokens": 200, "seed": 1}
    choice, _ = both_chat(real, **body, **OFF)
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    plain, _ = both(real, "x", **body)
    assert plain["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(plain["choices"][0]["text"]), PERSON)


def test_reasoning_stays_free(real: Door) -> None:
    """The model's own thought, token for token, until it closes it (which bias makes it do)."""
    structure = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
    no_markers = {str(MARKERS[name]): -100 for name in structure}
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
    free = real.chat(logit_bias=no_markers, **body)["choices"][0]
    body["structured_outputs"] = {"choice": ["yes", "no"]}
    bound = real.chat(logit_bias=no_markers, **body)["choices"][0]
    assert bound["token_ids"] == free["token_ids"] and bound["finish_reason"] == "length"
    assert bound["message"]["reasoning_content"] and not bound["message"]["content"]
    body |= {"max_tokens": 60, "logit_bias": {str(MARKERS["<|close|>"]): 100}}
    del body["return_token_ids"]
    choice, _ = both_chat(real, **body)
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"]}
    assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "城市": {"type": "string", "maxLength": 8},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["c", "f"]},
            },
            "required": ["城市", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "(foo|bar){2}[0-9]"}, "(foo|bar){2}[0-9]"),
        ({"choice": ["é", "yes", 'q"']}, 'é|yes|q"'),
        ({"grammar": 'start: "a" /[0-9]+/ "b"'}, "a[0-9]+b"),
        ({"grammar": 'root ::= "x" [yz] "x"?'}, "x[yz]x?"),
        ({"json": {"type": "boolean"}}, "true|false"),
        ({"json": '{"enum": [12]}'}, "12"),
    ],
)
def test_structured_outputs(real: Door, asked: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": asked, "max_tokens": 40, "n": 2, "seed": 3}
    for choice in both(real, "x", **body)[0]["choices"]:
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, choice["text"])
    chat = real.chat(**body, **OFF)
    for choice in chat["choices"]:
        content = choice["message"]["content"]
        assert choice["finish_reason"] == "length" or re.fullmatch(pattern, content)


def test_any_json(real: Door) -> None:
    for body in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"json": True}},
        schema_format({}),
        schema_format(True),
    ):
        text = real.text("x", max_tokens=60, temperature=0, logit_bias={"125": 90}, **body)
        assert isinstance(json.loads(text), dict) or "object" not in str(body)
    assert real.chat(max_tokens=2, response_format={"type": "text"})


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        (schema_format({"type": "objec"}), "response_format.json_schema.schema", "objec"),
        (schema_format({"type": "object", "properties": {"a": {"pattern": "[a-"}}}),
         "response_format.json_schema.schema", "unclosed"),
        (schema_format({"$ref": "#/$defs/none"}), "response_format.json_schema.schema", "none"),
        (schema_format(False), "response_format.json_schema.schema", "nothing"),
        (schema_format("x"), "response_format.json_schema.schema", "JSON schema"),
        (schema_format({}, strict="yes"), "response_format.json_schema.strict", "true or false"),
        (schema_format({}, name=5), "response_format.json_schema.name", "string"),
        (schema_format({}, colour=5), "response_format.json_schema.colour", "unknown"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "object"),
        ({"response_format": {"type": "banana"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"regex": "(a+)+$" * 40}}, "structured_outputs.regex", "look"),
        ({"structured_outputs": {"regex": "|".join(map(str, range(50_000)))}},
         "structured_outputs.regex", "characters"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "string"),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "x"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "schema"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "true"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx", "unknown"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
         "structured_outputs", "either"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
    ],
    ids=str,
)  # fmt: skip
def test_refused_by_name(door: Door, body: dict[str, Any], param: str, reason: str) -> None:
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = door.refused(path, **prompt, **body)
        assert error["param"] == param and reason in error["message"], error


def test_bad_grammars_leave_a_stream_alone(real: Door) -> None:
    body: dict[str, Any] = {"prompt": "s", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    alone = real.text(**body)
    bad: list[dict[str, Any]] = [
        schema_format({"type": "objec"}), schema_format({"$ref": "#/$defs/none"}),
        {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"grammar": "start: ("}},
        {"structured_outputs": {"json": {"not": {}}}},
    ]  # fmt: skip
    nested: Any = {}
    for _ in range(100):
        nested = {"type": "object", "properties": {"a": nested}}
    bad += [schema_format(nested)]
    good = schema_format({"type": "integer", "maximum": 20_000_000_000})

    async def run() -> tuple[str, list[int]]:
        async with httpx.AsyncClient(base_url=real.url, timeout=60, verify=False) as client:

            async def post(more: dict[str, Any]) -> httpx.Response:
                return await client.post(COMPLETIONS, json={"model": "tiny"} | more)

            stream = asyncio.create_task(post(body))
            others = [post({"prompt": "x", "max_tokens": 9} | more) for more in [*bad, good]]
            answers = await asyncio.gather(*others)
            text = (await stream).json()["choices"][0]["text"]
            return text, [answer.status_code for answer in answers]

    text, codes = asyncio.run(run())
    assert text == alone
    assert codes == [400] * len(bad) + [200]


def test_greedy_seeded_and_constrained_together(real: Door) -> None:
    """Masked rows, greedy rows and drawn rows in one batch: each as when it is alone."""
    bodies = [
        {"prompt": "a", "temperature": 0, "max_tokens": 30} | schema_format(PERSON),
        {"prompt": "b", "temperature": 1.0, "seed": 7, "max_tokens": 24, "ignore_eos": True},
        {"prompt": "c", "temperature": 0, "min_tokens": 8, "max_tokens": 16},
        {"prompt": "d", "seed": 3, "max_tokens": 24, "structured_outputs": {"regex": "[a-z ]*"}},
    ]
    alone = [real.text(**body) for body in bodies]  # type: ignore[arg-type]
    assert gather(real.url, bodies) == alone
    assert gather(real.url, bodies[::-1]) == alone[::-1]


def test_scores_of_masked_tokens(real: Door) -> None:
    body = {"structured_outputs": {"json": {"enum": ["yes", "no"]}}, "max_tokens": 20}
    choice, _ = both_chat(real, logprobs=True, top_logprobs=5, seed=1, **OFF, **body)
    entries = choice["logprobs"]["content"]
    assert all(one["logprob"] >= -9999.0 for entry in entries for one in entry["top_logprobs"])
    assert all(len(entry["top_logprobs"]) == 5 for entry in entries)
    scores = both(real, "x", logprobs=2, seed=1, **body)[0]["choices"][0]["logprobs"]
    assert min(scores["token_logprobs"]) >= -9999.0


# --- tools -------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_calls(real: Door, choice: Any) -> None:
    made, _ = both_chat(real, tools=[WEATHER], tool_choice=choice, seed=1, max_tokens=250,
                        parallel_tool_calls=False, **OFF)  # fmt: skip
    assert made["finish_reason"] == "tool_calls"
    (call,) = made["message"]["tool_calls"]
    assert made["message"]["content"] is None
    check_call(call)


def check_call(call: dict[str, Any]) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "clock":
        assert arguments == {}
    else:
        jsonschema.validate(arguments, WEATHER["function"]["parameters"])


def test_a_forced_call_that_is_cut(real: Door) -> None:
    asked = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False} | OFF
    for limit in (4, 48):  # before the call, and when its opening tag is complete
        made, _ = both_chat(real, max_tokens=limit, **asked)
        assert made["finish_reason"] == "length"
        assert bool(made["message"].get("tool_calls")) == (limit == 48)


def test_strict_tools_keep_to_their_schemas(real: Door) -> None:
    """The model is pushed to call: what it calls freely keeps to its schema."""
    strict = WEATHER | {"function": WEATHER["function"] | {"strict": True}}
    push = {str(MARKERS["<|open|>"]): 100, str(MARKERS["<|close|>"]): 50}
    body = {"temperature": 0, "max_tokens": 250, "logit_bias": push} | OFF
    choice = real.chat(tools=[strict], parallel_tool_calls=False, **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        check_call(call)


def test_a_format_or_calls(real: Door) -> None:
    asked = {"tools": [CLOCK], "max_tokens": 90, "seed": 1} | schema_format({"enum": ["yes"]}) | OFF
    messages = [
        real.chat(tool_choice=choice, **asked)["choices"][0]["message"]
        for choice in ("auto", "required", "none")
    ]
    assert messages[0]["content"] == '"yes"' or messages[0]["tool_calls"]
    assert messages[1]["content"] is None and messages[1]["tool_calls"]
    assert messages[2]["content"] == '"yes"'


def test_tools_of_a_system_message(real: Door) -> None:
    messages = [{"role": "system", "tools": [CLOCK]}, *USER]
    (choice,) = real.chat(messages=messages, tool_choice="required", max_tokens=120,
                          parallel_tool_calls=False, **OFF)["choices"]  # fmt: skip
    assert choice["finish_reason"] == "tool_calls"
    check_call(choice["message"]["tool_calls"][0])


def test_refused_tools(door: Door) -> None:
    def refused(**body: Any) -> str:
        return str(door.refused(CHAT, **({"messages": USER} | body))["param"])

    def with_schema(schema: Any, **more: Any) -> list[Any]:
        return [CLOCK, {"type": "function", "function": {"name": "f", "parameters": schema} | more}]

    field = "tools[1].function.parameters"
    broken = {"type": "object", "properties": {"a": {"type": "objec"}}}
    assert refused(tools=with_schema(broken), tool_choice="required") == field
    assert refused(tools=with_schema(broken, strict=True)) == field
    assert refused(tools=with_schema({"not": {}}), tool_choice="required") == field
    assert refused(tools=with_schema({"type": "array"})) == f"{field}.type"
    assert refused(tools=with_schema({}, strict="yes")) == "tools[1].function.strict"
    assert refused(tools=[CLOCK, CLOCK]) == "tools[1].function.name"
    assert refused(tools=[CLOCK], tool_choice=NAMED) == "tool_choice.function.name"
    assert refused(tool_choice="required") == "tool_choice"
    assert refused(messages=[USER[0] | {"tools": [CLOCK]}]) == "messages[0].tools"
    assert door.chat(tools=with_schema(broken), max_tokens=1)  # free calls follow no schema


# --- the official client's helpers -------------------------------------------------------------


class Trip(BaseModel):
    city: str = Field(max_length=6)
    days: int = Field(ge=1, le=9)


def test_official_helpers(real: Door) -> None:
    thinking = {"chat_template_kwargs": {"thinking": False}}
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as client:
        parsed = client.chat.completions.parse(
            model="tiny", messages=USER, response_format=Trip, seed=1, max_tokens=250,
            extra_body=thinking,
        )  # fmt: skip
        message = parsed.choices[0].message
        assert isinstance(message.parsed, Trip) and 1 <= message.parsed.days <= 9
        tool = openai.pydantic_function_tool(Trip)
        with client.chat.completions.stream(
            model="tiny", messages=USER, tools=[tool], tool_choice="required", seed=2,
            max_tokens=220, parallel_tool_calls=False, extra_body=thinking,
        ) as stream:  # fmt: skip
            kinds = [event.type for event in stream]
            final = stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        (call,) = final.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Trip)
        assert kinds.count("tool_calls.function.arguments.done") == 1
        assert kinds.count("tool_calls.function.arguments.delta") > 3
