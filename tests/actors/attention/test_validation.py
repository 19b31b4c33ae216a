import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from expertmesh.actors.attention.messages import (
    GenerateRequest,
    RequestRefused,
    SamplingParams,
)
from expertmesh.actors.attention.validation import Limits, check_request
from tests.support.engines import EOS, check_idle, fake_engine, finish, request

LIMITS = Limits(vocab_size=97, max_context=1024, pages=8, max_logprobs=20, eos_ids=frozenset({EOS}))
ALL_BUT_EOS = [token for token in range(97) if token != EOS]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ALL_BUT_EOS, "min_tokens": 1}, "stop_token_ids"),
        (
            {"stop_token_ids": list(range(97)), "min_tokens": 1, "ignore_eos": True},
            "stop_token_ids",
        ),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logit_bias": {97: 1.0}}, "logit_bias"),
        ({"logit_bias": {-3: 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 101.0}}, "logit_bias"),
        ({"logit_bias": {5: math.nan}}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
    ],
)
def test_bad_parameter_is_named(params: dict[str, Any], field: str) -> None:
    params = {"max_tokens": 4} | params
    with pytest.raises(RequestRefused) as refused:
        check_request(GenerateRequest("r", [1, 2], SamplingParams(**params)), LIMITS)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize("bad", [97, -1, 2**31, 2**63])
def test_prompt_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(RequestRefused, match=rf"{bad} at position 1 .*vocabulary of 97"):
        check_request(request("r", [0, bad, 5]), LIMITS)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestRefused, match="no tokens"):
        check_request(request("r", []), LIMITS)


def test_context_and_pages_are_named_with_their_numbers() -> None:
    with pytest.raises(RequestRefused, match=r"1000 prompt tokens .* 1025, the context holds 1024"):
        check_request(request("r", [1] * 1000, 25), LIMITS)
    # The last token is never kept: 512 prompt tokens and one new one fit 8 pages, two do not.
    check_request(request("r", [1] * 512, 1), LIMITS)
    with pytest.raises(RequestRefused, match="need 9 pages of 64 tokens, the whole cache has 8"):
        check_request(request("r", [1] * 512, 2), LIMITS)


def test_what_would_serve_a_prompt_that_is_too_long_for_the_pages_is_told() -> None:
    """Where it would: old pages can leave the device, and those that stay fit."""

    def said(near_pages: int, **fields: Any) -> str:
        wish = msgspec.structs.replace(request("r", [1] * 600, 2), **fields)
        with pytest.raises(RequestRefused) as refused:
            check_request(wish, replace(LIMITS, near_pages=near_pages))
        return str(refused.value)

    hint = "; kv_mode offload or select would serve it"
    assert said(8).endswith(f"the whole cache has 8{hint}")
    assert hint not in said(0) and hint not in said(9)
    assert hint not in said(8, session="s")  # sessions are exact


def test_refusal_and_admission_use_the_same_arithmetic() -> None:
    # D9: at every length around the capacity, refused at once or served to the end.
    capacity = 4 * 64
    for length in range(capacity - 128, capacity + 3):
        for max_tokens in (1, 2):
            engine, taken = fake_engine(pages=4, slots=2), True
            try:
                engine.submit(request("big", [1 + length % 90] * length, max_tokens))
            except RequestRefused as refused:
                assert length + max_tokens - 1 > capacity
                assert str(length) in str(refused)
                taken = False
            else:
                assert length + max_tokens - 1 <= capacity
            engine.submit(request("short", [5, 6], 2))
            answers = finish(engine, max_steps=50)
            assert answers["short"].finish_reason == "length"
            if taken:
                assert len(answers["big"].token_ids) == max_tokens
            check_idle(engine)


def test_end_ids_that_leave_a_token_are_served() -> None:
    # One id too few to forbid them all: by number, by repetition, without min_tokens.
    engine = fake_engine()
    engine.submit(request("eos", [1], 4, stop_token_ids=ALL_BUT_EOS, min_tokens=4))
    doubled = ALL_BUT_EOS[1:] * 2
    engine.submit(request("twice", [1], 4, stop_token_ids=doubled, min_tokens=4, ignore_eos=False))
    engine.submit(request("free", [1], 4, stop_token_ids=list(range(97))))
    with pytest.raises(RequestRefused, match="all 97 ids of the vocabulary"):
        stops = request("none", [1], 4, stop_token_ids=ALL_BUT_EOS, min_tokens=1, ignore_eos=False)
        engine.submit(stops)
    answers = finish(engine)
    assert answers["eos"].token_ids == [EOS] * 4
    assert answers["twice"].token_ids == [ALL_BUT_EOS[0]] * 4
    assert answers["free"].finish_reason == "stop" and len(answers["free"].token_ids) == 1
    check_idle(engine)


def test_refused_request_leaves_no_trace() -> None:
    engine = fake_engine()
    with pytest.raises(RequestRefused):
        engine.submit(request("r", [999]))
    check_idle(engine)
    engine.submit(request("r", [9]))
    with pytest.raises(RequestRefused, match="already in use") as refused:
        engine.submit(request("r", [9]))
    assert refused.value.field == "request_id"
    assert finish(engine)["r"].finish_reason == "length"
    engine.submit(request("r", [9]))  # the name is free again
    assert finish(engine)["r"].finishes == 1
