"""What clients say about cached state, whose it is, and what they are told of it."""

from typing import Any

import httpx
import pytest

from expertmesh.actors.attention.messages import KvReport, RequestRefused
from expertmesh.deploy.auth.keys import ApiKey, hash_key
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.openai.tenant import tenant_of
from tests.deploy.test_telemetry import samples
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
REPORT = KvReport(mode="select", bits=4.25, read_pages=7, estimated_pages=90, bound=0.5)
TOLD = {
    "mode": "select", "bits": 4.25, "read_pages": 7, "estimated_pages": 90, "bound": 0.5,
    "bound_kind": "estimate",
}  # fmt: skip


def key(name: str) -> ApiKey:
    return ApiKey(name=name, hash=hash_key(name))


class TestTenants:
    def test_no_two_pairs_of_key_and_salt_are_one(self) -> None:
        names, salts = (None, "a", "a.b", "b", "a@b"), (None, "a", "b", "/", "a/b", "b/", "\0")
        found = [tenant_of(name and key(name), salt) for name in names for salt in salts]
        assert len(set(found)) == len(found)

    def test_a_new_secret_keeps_what_the_name_has(self) -> None:
        old, new = key("a"), ApiKey(name="a", hash=hash_key("another"))
        assert tenant_of(old, "s") == tenant_of(new, "s")

    def test_a_request_is_its_key_s_and_its_salt_s(self, served: ServedModel) -> None:
        client = FakeEngineClient()
        edge = EdgeSettings.model_validate({"auth": {"key_hashes": [hash_key("em-x")]}})
        with http_server(build_app(Front(client, served, edge))) as url, Door(url) as door:
            bearer = {"authorization": "Bearer em-x"}
            for salt in (None, "s"):
                for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
                    sent = {"model": "tiny", "max_tokens": 1, "n": 2, "cache_salt": salt, **body}
                    door.http.post(path, json=sent, headers=bearer).raise_for_status()
        name = f"key-{hash_key('em-x').removeprefix('sha256:')[:8]}"
        tenants = [request.tenant for request in client.requests]
        assert tenants == [f"{name}/"] * 4 + [f"{name}/s"] * 4

    def test_without_keys_only_the_salt_counts(self, door: Door, fake: FakeEngineClient) -> None:
        door.complete("x", cache_salt="key-1")
        door.complete("x")
        assert [request.tenant for request in fake.requests] == ["/key-1", "/"]

    @pytest.mark.parametrize(
        ("path", "body"),
        [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})],
        ids=["completions", "chat"],
    )
    def test_the_salt_may_be_a_header(
        self, door: Door, fake: FakeEngineClient, path: str, body: dict[str, Any]
    ) -> None:
        """As on the routes of sessions."""

        def post(header: str, **salt: Any) -> httpx.Response:
            sent = {"model": "tiny", "max_tokens": 1, **body, **salt}
            return door.http.post(path, json=sent, headers={"X-Cache-Salt": header})

        for salt in ({}, {"cache_salt": "s"}, {"cache_salt": None}):
            post("s", **salt).raise_for_status()
        assert [request.tenant for request in fake.requests] == ["/s"] * 3
        for other in ("t", "", 5, ["s"]):
            assert envelope(post("s", cache_salt=other), 400)["param"] == "cache_salt"
        for header in ("", "x" * 257):
            assert envelope(post(header), 400)["param"] == "x-cache-salt"
        assert len(fake.requests) == 3


class TestWishes:
    def test_reach_the_engine(self, door: Door, fake: FakeEngineClient) -> None:
        door.complete("x", kv_mode="select", session_id="chat-1")
        door.chat(kv_mode="offload")
        door.complete("x", kv_mode=None, session_id=None, cache_salt=None)
        found = [(request.kv_mode, request.session) for request in fake.requests]
        assert found == [("select", "chat-1"), ("offload", ""), ("", "")]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("kv_mode", "lossy"), ("kv_mode", ""), ("kv_mode", 1), ("cache_salt", ""),
            ("cache_salt", 5), ("cache_salt", "x" * 257), ("session_id", ""), ("session_id", "a/b"),
            ("session_id", ".."), ("session_id", "x" * 129), ("session_id", "a b"),
            ("session_id", 5),
        ],
    )  # fmt: skip
    def test_are_checked_by_name(
        self, door: Door, fake: FakeEngineClient, field: str, value: Any
    ) -> None:
        assert door.refused(COMPLETIONS, prompt="x", **{field: value})["param"] == field
        assert door.refused(CHAT, messages=USER, **{field: value})["param"] == field
        assert not fake.requests

    def test_a_session_goes_on_with_one_answer(self, door: Door) -> None:
        for body in ({"prompt": "x", "n": 2}, {"prompt": ["x", "y"]}):
            error = door.refused(COMPLETIONS, session_id="s", **body)
            assert error["param"] == "session_id" and "2" in error["message"]
            assert error["code"] == "invalid_value"

    def test_what_the_engine_refuses_has_a_code_too(
        self, door: Door, fake: FakeEngineClient
    ) -> None:
        fake.refuse = RequestRefused("a session needs kv_mode exact", "session_id")
        error = door.refused(COMPLETIONS, prompt="x", session_id="s", kv_mode="select")
        assert (error["param"], error["code"]) == ("session_id", "invalid_value")


class TestReports:
    def test_cached_tokens_are_told(self, door: Door, fake: FakeEngineClient) -> None:
        fake.cached = lambda request: 64 if len(request.prompt_ids) > 70 else 0
        body = {"prompt": [[1] * 100, [1] * 9, [1] * 80], "max_tokens": 2}
        assert door.ok(COMPLETIONS, **body)["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 128
        }
        events = door.events(COMPLETIONS, **body, stream_options={"include_usage": True})
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128

    def test_a_prompt_that_one_choice_computes_is_not_cached(
        self, door: Door, fake: FakeEngineClient
    ) -> None:
        """The others find it in the cache, but the request did pay for it."""
        fake.cached = lambda request: 0 if request.request_id.endswith("-0") else 64
        usage = door.complete([1] * 100, n=3, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        fake.cached = lambda request: 64
        usage = door.complete([1] * 100, n=3, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 64

    @pytest.mark.parametrize("stop", [None, "c"])
    def test_what_was_not_read_exactly_is_told(
        self, door: Door, fake: FakeEngineClient, stop: str | None
    ) -> None:
        """Also of an answer that a stop string ends before the engine does."""
        fake.kv, fake.script = REPORT, lambda request: list(b"abcdef")
        body = {"max_tokens": 6, "n": 2, "stop": stop}
        for choice in door.complete("x", **body)["choices"]:
            assert choice["kv"] == TOLD
        for path, more in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
            ends = [
                choice
                for event in door.events(path, **body, **more)
                for choice in event["choices"]
                if choice["finish_reason"]
            ]
            assert [end["kv"] for end in ends] == [TOLD, TOLD]
        assert door.chat(max_tokens=3)["choices"][0]["kv"] == TOLD

    def test_exact_answers_say_nothing(self, door: Door) -> None:
        assert "kv" not in door.complete("x")["choices"][0]
        events = door.events(COMPLETIONS, prompt="x", max_tokens=2)
        assert all("kv" not in choice for event in events for choice in event["choices"])


class TestRealEngine:
    """A tiny model; every prompt is another one's in no other test."""

    def ask(self, real: Door, prompt: list[int], **body: Any) -> tuple[str, int]:
        answer = real.complete(prompt, temperature=0, max_tokens=6, ignore_eos=True, **body)
        details = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["text"], details["cached_tokens"]

    def test_a_prompt_seen_before_is_not_computed_again(self, real: Door) -> None:
        prompt = [(7 * i) % 250 for i in range(3 * 64 + 5)]
        cold = self.ask(real, prompt)
        assert cold[1] == 0
        assert self.ask(real, prompt) == (cold[0], 3 * 64)
        longer, cached = self.ask(real, [*prompt, 1, 2, 3])
        assert cached == 3 * 64
        assert self.ask(real, [*prompt, 1, 2, 3], cache_salt="fresh")[0] == longer

    def test_salts_share_nothing(self, real: Door) -> None:
        prompt = [(11 * i + 3) % 250 for i in range(2 * 64 + 5)]
        cold = self.ask(real, prompt, cache_salt="a")
        for salt, cached in (("b", 0), (None, 0), ("a", 128), ("b", 128), (None, 128)):
            assert self.ask(real, prompt, cache_salt=salt) == (cold[0], cached), salt

    def test_choices_of_a_prompt_count_it_once(self, real: Door) -> None:
        prompt = [(13 * i + 5) % 250 for i in range(2 * 64 + 5)]
        body = {"temperature": 0, "max_tokens": 3, "n": 3, "ignore_eos": True}
        cold, warm = (real.complete(prompt, **body) for _ in range(2))
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert cold["choices"] == warm["choices"]

    def test_the_counters_say_the_same(self, real: Door) -> None:
        prompt = [(17 * i + 9) % 250 for i in range(2 * 64 + 5)]
        before = real.http.get("/metrics").text
        for _ in range(3):
            self.ask(real, prompt)
        after = real.http.get("/metrics").text
        grown = [
            sum(samples(after, name).values()) - sum(samples(before, name).values())
            for name in ("prefix_cache_queries_total", "prefix_cache_hits_total")
        ]
        assert grown == [3 * len(prompt), 2 * 128]
