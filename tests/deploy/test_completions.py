"""Completions: text, stops, echo, logprobs and their offsets, the same streamed and whole."""

import base64
import io
import math
from typing import Any

import numpy as np
import pytest

from expertmesh.actors.attention.messages import GenerateRequest, TokenLogprobs
from expertmesh.actors.model.tokenizer import Tokenizer
from tests.deploy.conftest import VOCAB
from tests.support import fake_client
from tests.support.door import Door, finish, joined
from tests.support.fake_client import FakeEngineClient

PATH = "/v1/completions"
EOS = VOCAB - 14
LOGPROB_ARRAYS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def says(fake: FakeEngineClient, text: str, *, end: bool = True) -> None:
    """Script: the bytes of `text`, one token each, then the end id."""
    ids = [*text.encode(), EOS] if end else list(text.encode())
    fake.script = lambda request: ids


def both(door: Door, prompt: Any = "x", **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The same request plain and streamed; their common parts must agree."""
    plain = door.complete(prompt, **body)
    events = door.events(PATH, prompt=prompt, stream_options={"include_usage": True}, **body)
    usage = events.pop()
    assert usage["choices"] == []
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][field] == plain["usage"][field]
    for event in events:
        assert "usage" not in event and event["object"] == "text_completion"
    for choice in plain["choices"]:
        index = choice["index"]
        assert joined(events, index) == choice["text"]
        assert finish(events, index) == [choice["finish_reason"]]
        streamed = [
            one["logprobs"]
            for event in events
            for one in event["choices"]
            if one["index"] == index and one["logprobs"]
        ]
        if choice["logprobs"]:
            for name in LOGPROB_ARRAYS:
                assert [x for one in streamed for x in one[name]] == choice["logprobs"][name]
    return plain, events


def test_shape(door: Door) -> None:
    answer = door.complete("hello", max_tokens=3)
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 3


def test_finish_reasons(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "fine")
    plain, _ = both(door, max_tokens=50)
    assert plain["choices"][0]["text"] == "fine"  # the end id counts but does not show
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == 5
    plain, _ = both(door, max_tokens=2)
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == ("fi", "length")
    plain, _ = both(door, max_tokens=50, stop_token_ids=[ord("n")])
    assert plain["choices"][0]["text"] == "fi"
    assert plain["choices"][0]["stop_reason"] == ord("n")
    plain, _ = both(door, max_tokens=50, stop_token_ids=[ord("n")], include_stop_str_in_output=True)
    assert plain["choices"][0]["text"] == "fin"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("lo wor", "hel"), (["hello"], ""), (["xyz"], "hello world"), ("d", "hello worl"),
        (["world", "wor", "wo", "o w"], "hell"), (["worlds", "wor"], "hello "), ("h", ""),
    ],
)  # fmt: skip
def test_stop_strings(door: Door, fake: FakeEngineClient, stop: Any, expected: str) -> None:
    says(fake, "hello world")
    plain, events = both(door, max_tokens=60, stop=stop)
    choice = plain["choices"][0]
    assert choice["text"] == expected and choice["finish_reason"] == "stop"
    assert all(expected.startswith(joined(events[:n])) for n in range(len(events) + 1))
    if expected != "hello world":
        assert choice["stop_reason"] in stop
        whole, _ = both(door, max_tokens=60, stop=stop, include_stop_str_in_output=True)
        assert whole["choices"][0]["text"] == expected + choice["stop_reason"]


def test_stop_inside_a_character_s_bytes(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "über 漢字 ende")
    plain, _ = both(door, max_tokens=60, stop="字")
    assert plain["choices"][0]["text"] == "über 漢"
    assert plain["usage"]["completion_tokens"] == len("über 漢字".encode())


def test_a_stop_string_aborts_the_engine(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "hello world" * 3, end=False)  # never ends by itself
    door.text("x", max_tokens=100, stop="wor")
    assert fake.aborted == [fake.requests[-1].request_id]


def test_min_tokens_delays_stop_strings(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "aaaaaa")
    assert door.text("x", max_tokens=10, stop="a", min_tokens=3) == "aaa"


@pytest.mark.parametrize("text", ["👋🏽", "ďž", "漢字", "e\u0301x", "🇩🇪", "👨\u200d👩\u200d👧"])
def test_characters_split_over_tokens(door: Door, fake: FakeEngineClient, text: str) -> None:
    raw = text.encode()
    fake.script = lambda request: list(raw)
    plain, events = both(door, max_tokens=len(raw), n=2)
    assert [choice["text"] for choice in plain["choices"]] == [text, text]
    assert all("\ufffd" not in one["text"] for event in events for one in event["choices"])
    plain, events = both(door, max_tokens=len(raw) - 1)
    assert plain["choices"][0]["text"].count("\ufffd") == (1 if len(text[-1].encode()) > 1 else 0)
    assert all("\ufffd" not in event["choices"][0]["text"] for event in events[:-1])


def test_special_tokens_show_on_request(door: Door, fake: FakeEngineClient) -> None:
    fake.script = lambda request: [ord("a"), VOCAB - 1, ord("b"), EOS]
    assert door.text("x", max_tokens=9) == "ab"
    assert door.text("x", max_tokens=9, skip_special_tokens=False) == "a[PAD]b"


def test_scoring_without_generating(door: Door) -> None:
    for body in ({"echo": True, "logprobs": 1}, {"echo": True}, {}):
        plain, _ = both(door, "Your answer: Yes", max_tokens=0, temperature=0, **body)
        choice = plain["choices"][0]
        assert choice["text"] == ("Your answer: Yes" if "echo" in body else "")
        assert choice["finish_reason"] == "length" and plain["usage"]["completion_tokens"] == 0
        if "logprobs" in body:
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert "".join(choice["logprobs"]["tokens"]) == "Your answer: Yes"


def test_echo_of_token_ids(door: Door) -> None:
    plain, _ = both(door, [104, 105, VOCAB - 1], max_tokens=2, echo=True, logprobs=0)
    assert plain["choices"][0]["text"].startswith("hi")
    assert door.text([104, 105, VOCAB - 1], max_tokens=0, echo=True) == "hi"
    both(door, [[104, 105], [106]], max_tokens=2, echo=True, n=2)


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_are_parallel_and_offsets_index_the_text(door: Door, top: int) -> None:
    plain, _ = both(door, "a 👋 b", max_tokens=9, echo=True, logprobs=top)
    choice = plain["choices"][0]
    scores = choice["logprobs"]
    assert len({len(scores[name]) for name in LOGPROB_ARRAYS}) == 1
    for spelled, offset, best in zip(
        scores["tokens"], scores["text_offset"], scores["top_logprobs"], strict=True
    ):
        if not spelled.startswith("bytes:"):
            assert choice["text"][offset : offset + len(spelled)] == spelled
        if best is not None:
            assert spelled in best and len(best) == max(top, 1)


def test_logprobs_with_a_stop_string_end_with_the_text(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "hello world")
    plain, _ = both(door, max_tokens=60, logprobs=1, stop=" w")
    assert plain["choices"][0]["logprobs"]["tokens"] == list("hello w")
    assert plain["usage"]["completion_tokens"] == 7


def test_token_ids_as_logprob_keys(door: Door) -> None:
    plain, _ = both(door, [104], max_tokens=1, logprobs=1, return_tokens_as_token_ids=True)
    assert plain["choices"][0]["logprobs"]["tokens"] == ["token_id:104"]


def test_minus_infinity_is_floored(door: Door, fake: FakeEngineClient, monkeypatch: Any) -> None:
    def masked(token: int, top: int, vocab_size: int) -> TokenLogprobs:
        return TokenLogprobs(token, -math.inf, 1, [(token, -math.inf), (1, math.nan)][:top])

    monkeypatch.setattr(fake_client, "entry", masked)
    plain, _ = both(door, "hello", max_tokens=2, logprobs=2)
    assert plain["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0, -9999.0]


def test_token_ids_on_request(door: Door, fake: FakeEngineClient) -> None:
    says(fake, "abc")
    plain, events = both(door, [1, 2], max_tokens=9, return_token_ids=True)
    choice = plain["choices"][0]
    assert choice["token_ids"] == [*b"abc", EOS] and choice["prompt_token_ids"] == [1, 2]
    assert events[0]["choices"][0]["prompt_token_ids"] == [1, 2]
    streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == choice["token_ids"]


def test_several_choices(door: Door, fake: FakeEngineClient) -> None:
    def by_seed(request: GenerateRequest) -> list[int]:
        return [97 + (request.params.seed or 0), EOS]

    fake.script = by_seed
    plain, _ = both(door, ["x", "y"], max_tokens=4, n=3, seed=5)
    assert [choice["index"] for choice in plain["choices"]] == list(range(6))
    assert [choice["text"] for choice in plain["choices"]] == ["f", "g", "h"] * 2
    assert plain["usage"]["prompt_tokens"] == 2 and plain["usage"]["completion_tokens"] == 12


def test_request_id_shows_in_the_answer(door: Door) -> None:
    assert door.complete("x", max_tokens=1, request_id="abc")["id"] == "cmpl-abc"


def test_usage_only_when_asked(door: Door) -> None:
    for options in (None, {}, {"include_usage": False}):
        events = door.events(PATH, prompt="x", max_tokens=1, n=3, stream_options=options)
        assert all(event["choices"] and "usage" not in event for event in events)
    door.events(PATH, prompt="x", max_tokens=1, stream_options={"include_usage": True})


def test_routed_experts_are_a_numpy_file(door: Door, fake: FakeEngineClient) -> None:
    # The fake reports none: an empty file of the right shape, and the flag reaches the engine.
    plain, _ = both(door, "x", max_tokens=1, return_routed_experts=True)
    array = np.load(io.BytesIO(base64.b64decode(plain["choices"][0]["routed_experts"])))
    assert array.shape == (0, 2, 2) and array.dtype == np.int16
    assert fake.requests[-1].params.want_routed_experts


def test_tokenizer_of_the_door(door: Door, tokenizer: Tokenizer) -> None:
    text = "hello <|open|> 漢"
    answer = door.ok("/tokenize", prompt=text, return_token_strs=True)
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 1024
    assert all(token < VOCAB - 16 for token in answer["tokens"])  # markers in text are text
    assert door.ok("/detokenize", tokens=answer["tokens"])["prompt"] == text
    chat = door.ok("/tokenize", messages=[{"role": "user", "content": "hi"}])
    assert any(token >= VOCAB - 16 for token in chat["tokens"])
    assert door.refused("/detokenize", tokens=[VOCAB])["param"] == "tokens"
    assert door.refused("/tokenize")["param"] == "prompt"
