"""What has brought other servers down or made them lie, tried here with its neighbours in kind."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest

from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.openai.completions import CompletionGeneration
from tests.deploy.conftest import VOCAB
from tests.deploy.test_completions import both
from tests.support.door import Door, envelope, joined
from tests.support.fake_client import FakeEngineClient

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
V = 512  # of the real checkpoint
USAGE = {"include_usage": True}


class TestUsage:
    @pytest.mark.parametrize(
        ("path", "body"), [(COMPLETIONS, {"prompt": ["ab", "c"]}), (CHAT, {"messages": USER})]
    )
    def test_running_totals_end_in_the_totals(
        self, door: Door, path: str, body: dict[str, Any]
    ) -> None:
        body = body | {"max_tokens": 5, "n": 3, "ignore_eos": True}
        plain = door.ok(path, **body)["usage"]
        options = USAGE | {"continuous_usage_stats": True}
        events = door.events(path, stream_options=options, **body)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts) and events[-1]["usage"] == plain
        assert events[-1]["choices"] == [] and all(event["choices"] for event in events[:-1])
        assert all(event["usage"]["prompt_tokens"] == plain["prompt_tokens"] for event in events)

    @pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
    def test_running_totals_come_with_the_totals(self, door: Door, path: str) -> None:
        body = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
        for options in ({"continuous_usage_stats": True},
                        {"continuous_usage_stats": True, "include_usage": False}):  # fmt: skip
            error = door.refused(path, stream=True, stream_options=options, **body)
            assert error["param"] == "stream_options.continuous_usage_stats"
        error = door.refused(path, stream=True, stream_options={"include_usage": 1}, **body)
        assert error["param"] == "stream_options.include_usage"

    @pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
    def test_chat_tells_usage_only_when_asked(self, door: Door, options: Any) -> None:
        events = door.events(CHAT, messages=USER, max_tokens=1, n=3, stream_options=options)
        assert all(event["choices"] and "usage" not in event for event in events)

    def test_chat_totals_are_those_of_the_plain_answer(self, door: Door) -> None:
        body = {"messages": USER, "max_tokens": 4, "n": 3, "ignore_eos": True}
        *events, last = door.events(CHAT, stream_options=USAGE, **body)
        assert last["choices"] == [] and last["usage"] == door.ok(CHAT, **body)["usage"]
        assert last["usage"]["completion_tokens"] == 12
        assert all("usage" not in event for event in events)


class TestChoices:
    def test_best_of_may_say_what_is_so_anyway(self, door: Door) -> None:
        assert len(door.complete("x", max_tokens=1, n=2, best_of=2)["choices"]) == 2
        for body in ({"best_of": 2}, {"best_of": 1, "n": 2}, {"best_of": 10**9}, {"best_of": 0}):
            assert door.refused(COMPLETIONS, prompt="x", **body)["param"] == "best_of"

    @pytest.mark.parametrize("n", [129, 10**9, 2**63, 2**70, 0, -1, 1.5, "2", True, [2]])
    def test_too_many_choices(self, door: Door, fake: FakeEngineClient, n: Any) -> None:
        assert door.refused(COMPLETIONS, prompt="x", n=n)["param"] == "n"
        assert door.refused(CHAT, messages=USER, n=n)["param"] == "n"
        assert fake.requests == []

    def test_prompts_times_choices(self, door: Door, fake: FakeEngineClient) -> None:
        error = door.refused(COMPLETIONS, prompt=["x"] * 100, n=100)
        assert error["param"] == "n" and "10000" in error["message"]
        assert fake.requests == []

    def test_salts_and_users_change_nothing(self, door: Door) -> None:
        plain = door.text("salted", max_tokens=6)
        assert door.text("salted", max_tokens=6, cache_salt="tenant-1", user="u") == plain
        for value in ("", "x" * 257, 5):
            assert door.refused(COMPLETIONS, prompt="x", cache_salt=value)["param"] == "cache_salt"


class TestText:
    @pytest.mark.parametrize(
        "text",
        ["a\ufffdb", "\0", "\x7f\x80", "\u2028\u2029", "\ufeffbom", "a\r\nb", "'\"\\/", "</s>",
         "data: [DONE]\n\n", "\U0010ffff", "e\u0301\u0301\u0301", "\u202eabc"],
    )  # fmt: skip
    def test_any_text_arrives_as_it_was_made(
        self, door: Door, fake: FakeEngineClient, text: str
    ) -> None:
        raw = list(text.encode())
        fake.script = lambda request: raw
        plain, _ = both(door, max_tokens=len(raw), n=2, logprobs=1)
        assert [choice["text"] for choice in plain["choices"]] == [text, text]
        plain, _ = both(door, text, max_tokens=0, echo=True)
        assert plain["choices"][0]["text"] == text

    def test_bytes_that_are_no_text(self, door: Door, fake: FakeEngineClient) -> None:
        raw = [0xFF, 0x61, 0xC3, 0x61, 0xF0, 0x9F, 0x61]
        fake.script = lambda request: raw
        plain, _ = both(door, max_tokens=len(raw), logprobs=0)
        assert plain["choices"][0]["text"] == bytes(raw).decode("utf-8", "replace")

    def test_every_id_of_the_vocabulary_has_a_spelling(
        self, door: Door, tokenizer: Tokenizer
    ) -> None:
        """Reserved rows too: they show by name, or not at all."""
        ids = list(range(VOCAB))
        plain, _ = both(door, ids, max_tokens=1, echo=True, logprobs=1, skip_special_tokens=False)
        assert plain["choices"][0]["text"].startswith(tokenizer.decode(ids)[:-1])
        assert len(plain["choices"][0]["logprobs"]["tokens"]) == VOCAB + 1
        assert door.ok("/detokenize", tokens=ids)["prompt"] == tokenizer.decode(ids)

    @pytest.mark.parametrize(
        ("stop", "expected"),
        [("👋", "ab"), (["b👋"], "a"), ("\ufe0f", "ab👋🏽c"), (["zz", "🏽"], "ab👋"),
         ("c" * 1024, "ab👋🏽c"), ("\0", "ab👋🏽c"), (["c", "c", "c"], "ab👋🏽"), ("B", "ab👋🏽c")],
    )  # fmt: skip
    def test_stops_are_text(
        self, door: Door, fake: FakeEngineClient, stop: Any, expected: str
    ) -> None:
        raw = list("ab👋🏽c".encode())
        fake.script = lambda request: raw
        plain, events = both(door, max_tokens=len(raw), stop=stop, n=2)
        assert [choice["text"] for choice in plain["choices"]] == [expected, expected]
        assert all("\ufffd" not in one["text"] for event in events for one in event["choices"])


class TestBreakage:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bug_in_the_middle_is_told_as_one(
        self, door: Door, fake: FakeEngineClient, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        feed, fed = CompletionGeneration.feed, [0]

        def broken(self: CompletionGeneration, index: int, output: Any) -> tuple[bytes, bool]:
            fed[0] += 1
            if fed[0] == 3:
                raise RuntimeError("a secret inside")
            return feed(self, index, output)

        monkeypatch.setattr(CompletionGeneration, "feed", broken)
        fake.seconds = 0.01
        body = {"prompt": "abcdef", "max_tokens": 6, "ignore_eos": True}
        if stream:
            error = door.events(COMPLETIONS, **body)[-1]["error"]
        else:
            # A plain answer is read at its end: as one output, unless something stops early.
            error = door.refused(COMPLETIONS, 500, stop="zz", n=3, **body)
        assert (error["message"], error["type"]) == ("internal error", "server_error")
        assert len(fake.aborted) == len(fake.requests)

    def test_errors_are_small_whatever_came(self, door: Door) -> None:
        for body in (
            {"prompt": {"a" * 10_000: 1}},
            {"prompt": "x", "logit_bias": {str(i): "x" for i in range(5000)}},
            {"prompt": "x", "stop": ["y"] * 5000},
            {"prompt": "x", "stop_token_ids": [-1] * 5000},
            {"prompt": [["x"]] * 5000},
            {"prompt": "x", "user": "u" * 100_000},
            {"prompt": "x", "request_id": "é" * 100_000},
            {"prompt": "x", "model": "m" * 100_000},
            {f"field{i}": i for i in range(5000)},
        ):
            response = door.post(COMPLETIONS, **body)
            assert len(response.content) < 2000
            envelope(response, 404 if "model" in body else 400)


BAD: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": ["ok", ""]}),
    (COMPLETIONS, {"prompt": [0, V, 5], "max_tokens": 1}),
    (COMPLETIONS, {"prompt": [2**63]}),
    (COMPLETIONS, {"prompt": "x", "logprobs": 10**9}),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [V + 100], "min_tokens": 1}),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [-1]}),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 5, "max_tokens": 4}),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"999999": 5}}),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}),
    (COMPLETIONS, {"prompt": "x", "n": 10**9}),
    (COMPLETIONS, {"prompt": "x" * 100_000}),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 2**62}),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 10**9}),
    (CHAT, {"messages": USER, "top_logprobs": 3}),
    (CHAT, {"messages": USER, "max_tokens": 0}),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    (CHAT, {"messages": USER, "tools": [[[]]]}),
]


def test_bad_requests_leave_running_streams_alone(real: Door) -> None:
    bodies = [
        {"prompt": f"stream {i}", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        for i in range(4)
    ]
    undisturbed = [real.text(**body) for body in bodies]

    def stream(body: dict[str, Any]) -> str:
        with Door(real.url) as own:
            return joined(own.events(COMPLETIONS, **body))

    deep = "[" * 10_000 + "]" * 10_000
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(stream, body) for body in bodies]
        for path, body in BAD:
            real.refused(path, **body)
        for field in ("tools", "messages", "response_format", "unknown", "logit_bias"):
            content = f'{{"model":"tiny","messages":[],"{field}":{deep}}}'
            envelope(real.http.post(CHAT, content=content), 400)
        assert [one.result() for one in running] == undisturbed


def test_scoring_leaves_the_next_request_alone(real: Door) -> None:
    plain, _ = both(real, "Your answer: Yes", echo=True, logprobs=1, max_tokens=0, temperature=0)
    choice = plain["choices"][0]
    assert choice["text"] == "Your answer: Yes" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert plain["usage"]["completion_tokens"] == 0
    assert real.complete("x", max_tokens=0)["choices"][0]["text"] == ""


def test_an_empty_turn_is_a_turn(real: Door) -> None:
    empty = [{"role": "user", "content": ""}]
    assert real.ok(CHAT, messages=empty, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_logprobs_of_a_stream_are_those_of_the_answer(real: Door) -> None:
    body = {"messages": USER, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
            "logprobs": True}  # fmt: skip
    for extra in ({}, {"top_logprobs": 0}, {"top_logprobs": 3}):
        plain = real.ok(CHAT, **body, **extra)["choices"][0]["logprobs"]["content"]
        events = real.events(CHAT, **body, **extra)
        streamed = [
            entry
            for event in events
            for choice in event["choices"]
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        assert streamed == plain and len(plain) == 6
        for entry in plain:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == extra.get("top_logprobs", 0)
            orjson.loads(json.dumps(entry, allow_nan=False))


def test_a_seed_holds_whoever_is_beside(real: Door) -> None:
    seeded = {"prompt": "seeded", "seed": 42, "temperature": 0.8, "max_tokens": 12,
              "ignore_eos": True}  # fmt: skip
    alone = real.text(**seeded)
    for extra in ({}, {"seed": 7}, {"temperature": 0}, {"seed": 42}):
        other: dict[str, Any] = {"prompt": "other", "max_tokens": 12, "ignore_eos": True} | extra
        with ThreadPoolExecutor(2) as threads:
            pair = (seeded, other) if "seed" in extra else (other, seeded)
            answers = list(threads.map(lambda body: _text(real.url, body), pair))
        assert answers[pair.index(seeded)] == alone


def _text(url: str, body: dict[str, Any]) -> str:
    with Door(url) as own:
        return own.text(**body)


def test_ids_that_clients_share_do_not_mix_answers(door: Door, fake: FakeEngineClient) -> None:
    """Header, body and both, plain and streamed, at the same time."""
    wrong: list[str] = []

    def one(number: int) -> None:
        prompt = f"prompt {number:04d}."
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 30, "stop": "."}
        if number % 3:
            body["request_id"] = "same"
        with Door(door.url) as own:
            own.http.headers["x-request-id"] = "same"
            text = own.text(**body) if number % 2 else joined(own.events(COMPLETIONS, **body))
        if text != prompt[:-1]:
            wrong.append(text)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len({request.request_id for request in fake.requests}) == 40
