"""What a request may say: strict types, null as absent, named unknowns, limits with numbers."""

from typing import Any

import pytest

from tests.deploy.conftest import VOCAB
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

COMPLETION_FIELDS = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "min_tokens", "ignore_eos", "logit_bias",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stream", "stream_options",
    "response_format", "user", "request_id", "priority", "return_token_ids", "echo", "logprobs",
    "return_tokens_as_token_ids", "return_routed_experts",
)  # fmt: skip
CHAT_FIELDS = (
    "max_tokens", "max_completion_tokens", "stop", "seed", "logit_bias", "tools", "tool_choice",
    "response_format", "stream_options", "logprobs", "top_logprobs", "parallel_tool_calls",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_null_is_absent_in_completions(door: Door, field: str) -> None:
    plain = door.complete("test", temperature=0)
    assert without_ids(door.complete("test", **{"temperature": 0, field: None})) == without_ids(
        plain
    )


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_null_is_absent_in_chat(door: Door, field: str) -> None:
    body = {"max_tokens": 3} if "max" not in field else {}
    plain = without_ids(door.chat(**body))
    assert without_ids(door.chat(**body, **{field: None})) == plain


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_field_is_named(door: Door, path: str) -> None:
    body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    error = door.refused(path, **body, temprature=0.5)
    assert error["param"] == "temprature" and "temprature" in error["message"]
    error = door.refused(path, **body, stream=True, stream_options={"usage": True})
    assert error["param"] == "stream_options.usage"


@pytest.mark.parametrize("field", ["suffix", "functions"])
def test_known_but_unsupported_field_says_so(door: Door, field: str) -> None:
    error = door.refused(COMPLETIONS, prompt="x", **{field: {}})
    assert error["param"] == field and "not supported yet" in error["message"]


@pytest.mark.parametrize("value", [-1, 1.5, "5", True, 2**64, [], {}])
def test_max_tokens_is_a_strict_integer(door: Door, value: Any) -> None:
    assert door.refused(COMPLETIONS, prompt="x", max_tokens=value)["param"] == "max_tokens"
    assert door.refused(CHAT, messages=USER, max_tokens=value)["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_k", 0), ("top_k", -2), ("top_k", 1.5),
        ("min_p", -0.1), ("min_p", 1.1), ("n", 0), ("n", -1), ("n", 1000), ("n", True),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.5), ("stop", ""), ("stop", ["a", ""]),
        ("stop", [1]), ("stop", ["a"] * 17), ("stop", "x" * 2000), ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]), ("min_tokens", -1),
        ("logit_bias", {"999999": 5}), ("logit_bias", {"-3": 1}), ("logit_bias", {"abc": 1}),
        ("logit_bias", {"5": 101}), ("logit_bias", {"5": None}), ("logit_bias", {"5": 1e39}),
        ("logit_bias", [1]), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("stream", "true"), ("stream", 1),
        ("user", 5), ("priority", 2**40), ("response_format", {"type": "banana"}),
        ("response_format", {"type": ""}), ("response_format", {}), ("stream_options", {}),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", 10**9), ("logprobs", True),
        ("echo", "yes"), ("request_id", ""),
    ],
)  # fmt: skip
def test_out_of_range_is_refused_by_name(door: Door, field: str, value: Any) -> None:
    error = door.refused(COMPLETIONS, prompt="x", **{field: value})
    assert error["param"] and error["param"].split(".")[0].split("[")[0] == field, error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["ok", ""], [[1], []], 5, {}, [None], [1.5], [True], [1, "a"],
               ["a", [1, 2]], [[1], "a"], [0, VOCAB, 5], [-1], [2**31], [2**63], [[1], [VOCAB]]],
)  # fmt: skip
def test_bad_prompts(door: Door, prompt: Any) -> None:
    error = door.refused(COMPLETIONS, prompt=prompt, max_tokens=1)
    assert error["param"].startswith("prompt")
    if prompt == [0, VOCAB, 5]:
        assert str(VOCAB) in error["message"] and f"{VOCAB - 1}" in error["message"]


def test_prompt_kinds(door: Door, fake: FakeEngineClient) -> None:
    text = door.complete("hello", max_tokens=2)
    ids = [fake.requests[-1].prompt_ids]
    assert door.complete(ids[0], max_tokens=2)["choices"] == text["choices"]
    both = door.complete(["hello", "world"], max_tokens=2)
    assert [choice["index"] for choice in both["choices"]] == [0, 1]
    world = fake.requests[-1].prompt_ids
    assert door.complete([*ids, world], max_tokens=2)["choices"] == both["choices"]
    assert both["usage"]["prompt_tokens"] == len(ids[0]) + len(world)


def test_missing_fields(door: Door) -> None:
    assert door.refused(COMPLETIONS)["param"] == "prompt"
    assert door.refused(CHAT)["param"] == "messages"
    assert envelope(door.http.post(COMPLETIONS, json={"prompt": "x"}), 400)["param"] == "model"


def test_min_tokens_above_max_tokens(door: Door) -> None:
    error = door.refused(COMPLETIONS, prompt="x", min_tokens=5, max_tokens=4)
    assert error["param"] == "min_tokens" and "5" in error["message"] and "4" in error["message"]


def test_context_length_has_the_numbers(door: Door) -> None:
    error = door.refused(COMPLETIONS, prompt=[1] * 1000, max_tokens=25)
    assert error["code"] == "context_length_exceeded" and error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("1024", "1000", "25", "1025"))
    assert door.complete([1] * 1000, max_tokens=24)["usage"]["completion_tokens"] == 24
    assert door.refused(COMPLETIONS, prompt=[1] * 1024)["param"] == "prompt"
    for limit in (0, 5, 2000):
        error = door.refused(COMPLETIONS, prompt=[1] * 1025, max_tokens=limit)
        assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    # Without a limit of its own a completion takes OpenAI's 16, or what is left.
    assert door.complete([1] * 1020)["usage"]["completion_tokens"] == 4
    assert door.complete([1])["usage"]["completion_tokens"] == 16


def test_chat_without_a_limit_may_fill_the_context(door: Door, fake: FakeEngineClient) -> None:
    usage = door.chat(ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 1024
    long = [{"role": "user", "content": "hi " * 1024}]
    assert door.refused(CHAT, messages=long, max_tokens=5)["param"] == "messages"
    error = door.refused(CHAT, messages=USER, max_completion_tokens=1024)
    assert error["param"] == "max_completion_tokens" and "1024" in error["message"]


def test_top_logprobs_range(door: Door) -> None:
    for top in (10**9, 21, VOCAB, VOCAB + 1, -1):
        error = door.refused(CHAT, messages=USER, logprobs=True, top_logprobs=top)
        assert error["param"] == "top_logprobs"
    assert "20" in door.refused(CHAT, messages=USER, logprobs=True, top_logprobs=21)["message"]
    assert door.refused(CHAT, messages=USER, top_logprobs=3)["param"] == "top_logprobs"


def test_stream_options_need_a_stream(door: Door) -> None:
    body = {"include_usage": True}
    assert door.refused(CHAT, messages=USER, stream_options=body)["param"] == "stream_options"


def test_sampling_reaches_the_engine(door: Door, fake: FakeEngineClient) -> None:
    door.complete(
        "hello", max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=-1,
        stop_token_ids=[300], min_tokens=2, ignore_eos=True, logit_bias={"5": 1.5},
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, priority=3, n=2,
    )  # fmt: skip
    first, second = fake.requests
    params = first.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 7)
    assert (params.min_p, params.min_tokens, params.ignore_eos) == (0.1, 2, True)
    assert params.stop_token_ids == [300] and params.logit_bias == {5: 1.5}
    assert (params.presence_penalty, params.frequency_penalty) == (0.5, -0.5)
    assert params.repetition_penalty == 1.1 and first.priority == 3
    # A negative seed wraps; choices differ by their seeds, and by their ids.
    assert (params.seed, second.params.seed) == (2**63 - 1, 0)
    assert first.request_id != second.request_id


@pytest.mark.parametrize("value", ["", "a b", "a\nb", "\u00e9", "x" * 257])
def test_request_id_is_as_limited_as_the_header(door: Door, value: str) -> None:
    assert door.refused(COMPLETIONS, prompt="x", request_id=value)["param"] == "request_id"
    assert door.complete("x", request_id="job-1")["id"] == "cmpl-job-1"


def test_one_bias_per_token(door: Door) -> None:
    error = door.refused(COMPLETIONS, prompt="x", logit_bias={"5": 1, "05": 2})
    assert error["param"] == "logit_bias.05" and "twice" in error["message"]


def test_biases_have_a_limit(door: Door) -> None:
    error = door.refused(COMPLETIONS, prompt="x", logit_bias={str(i): 1 for i in range(1025)})
    assert error["param"] == "logit_bias" and "1024" in error["message"]


def test_messages_are_in_the_words_of_the_api(door: Door) -> None:
    error = door.refused(COMPLETIONS, prompt="x", response_format="text")
    assert error["message"] == "'response_format': must be an object"
    error = door.refused(COMPLETIONS, prompt="x", model="")
    assert error["message"] == "'model': must have at least 1 character"
    error = door.refused(CHAT, messages=[{"role": "assistant"}])
    assert "an assistant message needs content" in error["message"]


def test_nothing_of_a_tokenize_request_is_passed_over(door: Door) -> None:
    for field, value in (("tools", []), ("chat_template_kwargs", {"thinking": False})):
        assert door.refused("/tokenize", prompt="x", **{field: value})["param"] == field
        assert door.ok("/tokenize", messages=USER, **{field: value})["count"]
        assert door.ok("/tokenize", prompt="x", **{field: None})["count"] == 1
