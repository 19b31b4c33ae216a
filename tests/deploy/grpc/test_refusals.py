"""Bad calls: the right status, the field by its name in the .proto, and never INTERNAL."""

import math
from typing import Any

import grpc
import pytest

from expertmesh.actors.attention.messages import EngineBusy, RequestRefused
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused
from tests.support.grpc_server import GrpcThread
from tests.support.raw_grpc import RawChannel, framed

INVALID, GENERATE = grpc.StatusCode.INVALID_ARGUMENT, "/expertmesh.v1.Engine/Generate"

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "sampling_params.temperature"),
    ({"temperature": math.nan}, "sampling_params.temperature"),
    ({"top_p": 0}, "sampling_params.top_p"),
    ({"top_p": math.inf}, "sampling_params.top_p"),
    ({"top_k": 0}, "sampling_params.top_k"),
    ({"min_p": -0.1}, "sampling_params.min_p"),
    ({"frequency_penalty": math.nan}, "sampling_params.frequency_penalty"),
    ({"repetition_penalty": 0}, "sampling_params.repetition_penalty"),
    ({"max_tokens": 2**32 - 1}, "sampling_params.max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "sampling_params.min_tokens"),
    ({"n": 0}, "sampling_params.n"),
    ({"n": 2**32 - 1}, "sampling_params.n"),
    ({"stop": [""]}, "sampling_params.stop"),
    ({"stop": ["x"] * 17}, "sampling_params.stop"),
    ({"stop_token_ids": [320]}, "sampling_params.stop_token_ids"),
    ({"logit_bias": {320: 1}}, "sampling_params.logit_bias"),
    ({"logit_bias": {3: math.nan}}, "sampling_params.logit_bias[3]"),
    ({"logit_bias": {3: 101}}, "sampling_params.logit_bias[3]"),
    ({"logprobs": 21}, "sampling_params.logprobs"),
    ({"prompt_logprobs": 21}, "sampling_params.prompt_logprobs"),
    ({"request_id": "with space"}, "request_id"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"priority": 10**6 + 1}, "priority"),
    ({"prompt": ""}, "text"),
    ({"prompt": "x" * 100_000}, "text"),
    ({"prompt": []}, "tokenized.input_ids"),
    ({"prompt": [1, 320]}, "tokenized.input_ids"),
    ({"prompt": [1, 2**32 - 1]}, "tokenized.input_ids"),
    ({"prompt": [1] * 1024}, "tokenized.input_ids"),
    ({"prompt": [1] * 100_000}, "tokenized.input_ids"),
]


@pytest.mark.parametrize(("fields", "field"), BAD)
def test_a_bad_field_is_named(
    engine: EngineStub, fake: FakeEngineClient, fields: dict[str, Any], field: str
) -> None:
    code, message, details = refused(engine.Generate(ask(**fields), timeout=20))
    assert code is INVALID
    (violation,) = details["BadRequest"].field_violations
    assert violation.field == field and message
    assert details["ErrorInfo"].domain == "expertmesh"
    assert not fake.requests, "a bad request never reaches the engine"


def test_a_request_without_a_prompt(engine: EngineStub) -> None:
    code, message, details = refused(engine.Generate(pb.GenerateRequest()))
    assert code is INVALID and "tokenized" in message and "text" in message
    assert details["BadRequest"].field_violations[0].field == "input"


def test_another_model_is_not_found_and_the_served_one_is(engine: EngineStub) -> None:
    code, message, details = refused(engine.Generate(ask(model="other")))
    assert code is grpc.StatusCode.NOT_FOUND and "'other'" in message
    assert details["ErrorInfo"].reason == "MODEL_NOT_FOUND"
    assert Answer(engine.Generate(ask(model="tiny"))).ends


def test_a_long_message_still_fits_a_client_s_headers(
    engine: EngineStub, fake: FakeEngineClient
) -> None:
    """Percent-encoding makes 12 bytes of one emoji; above 8 KiB the call would fail otherwise."""
    for text in ("\U0001f600" * 5000, "%" * 5000, "\u0000\n" * 5000):
        fake.down = text
        code, message, details = refused(engine.Generate(ask()))
        assert code is grpc.StatusCode.UNAVAILABLE and message.startswith(text[:100])
        assert len(message) < 2000 and "RetryInfo" in details


@pytest.mark.parametrize(
    "unknown",
    [
        pb.GenerateRequest(text="a").SerializeToString() + b"\xc0\x3e\x01",  # field 1000
        b"\x22\x05\xc2\x3e\x02hi" + pb.GenerateRequest(text="a").SerializeToString(),  # nested
        pb.GenerateRequest(text="a").SerializeToString() + b"\x30\x01",  # a reserved number
    ],
)
def test_an_unknown_field_is_refused_not_dropped(server: GrpcThread, unknown: bytes) -> None:
    with RawChannel(server.address) as raw:
        code, message = raw.call(GENERATE, framed(unknown))
    assert code == INVALID.value[0] and "unknown to this server" in message


class TestStatuses:
    def test_a_refusal_of_the_engine(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.refuse = RequestRefused("too long for the pages", "max_tokens")
        code, message, details = refused(engine.Generate(ask()))
        assert (code, message) == (INVALID, "too long for the pages")
        assert details["BadRequest"].field_violations[0].field == "sampling_params.max_tokens"

    def test_a_full_queue(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.refuse = EngineBusy("9 requests are waiting, at most 9 may")
        call = engine.Generate(ask())
        code, message, details = refused(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "9 requests" in message
        assert details["RetryInfo"].retry_delay.seconds == 1
        assert dict(call.trailing_metadata())["retry-after"] == "1"

    def test_too_many_requests(self, server: GrpcThread, engine: EngineStub) -> None:
        server.front.traffic.requests += 64
        try:
            code, message, details = refused(engine.Generate(ask()))
        finally:
            server.front.traffic.requests -= 64
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "64 requests" in message
        assert "RetryInfo" in details

    def test_not_ready(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.down = "rank 1, layer 2: the peer closed"
        code, message, details = refused(engine.Generate(ask()))
        assert code is grpc.StatusCode.UNAVAILABLE and fake.down in message
        assert "RetryInfo" in details
        health = engine.HealthCheck(pb.HealthCheckRequest())
        assert (health.healthy, health.message) == (False, fake.down)

    def test_an_engine_lost_in_the_middle(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.fail_after, fake.seconds = 3, 0.02
        messages = []
        with pytest.raises(grpc.RpcError) as failed:
            for message in engine.Generate(ask(max_tokens=9)):
                messages.append(message)
        assert sum(len(message.chunk.token_ids) for message in messages) == 3
        assert not any(message.HasField("complete") for message in messages)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "rank 1, layer 2" in failed.value.details()

    def test_a_bug_tells_nothing(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.refuse = KeyError("a secret of ours")
        code, message, _ = refused(engine.Generate(ask()))
        assert (code, message) == (grpc.StatusCode.INTERNAL, "internal error")

    def test_what_is_not_there(self, channel: grpc.Channel) -> None:
        for method in ("/expertmesh.v1.Engine/Embed", "/other.Service/Generate"):
            code, _, _ = refused(channel.unary_stream(method)(b""))
            assert code is grpc.StatusCode.UNIMPLEMENTED


class TestWire:
    """Frames that grpcio's own client does not send."""

    def call(self, server: GrpcThread, *arguments: Any, **options: Any) -> tuple[int, str]:
        with RawChannel(server.address) as raw:
            return raw.call(GENERATE, *arguments, **options)

    def test_bytes_that_are_no_message(self, server: GrpcThread) -> None:
        for body in (b"\xff\xff\xff\xff", b"\x1a\x05ab", b"\x0a\x02\xff\xfe"):  # the last: no UTF-8
            code, message = self.call(server, framed(body))
            assert code == INVALID.value[0] and "expertmesh.v1.GenerateRequest" in message

    def test_an_end_without_a_message(self, server: GrpcThread) -> None:
        code, message = self.call(server, None)
        assert code == INVALID.value[0] and "no message" in message
        with RawChannel(server.address) as raw:
            assert raw.call("/expertmesh.v1.Engine/Abort", None)[0] == INVALID.value[0]

    def test_an_empty_message_is_one(self, server: GrpcThread) -> None:
        code, message = self.call(server, framed(b""))
        assert code == INVALID.value[0] and "is required" in message

    def test_half_a_message(self, server: GrpcThread) -> None:
        whole = framed(ask().SerializeToString())
        assert self.call(server, whole[:-2])[0] in (INVALID.value[0], 13)

    def test_a_client_that_does_not_end_its_side(self, server: GrpcThread) -> None:
        body = framed(ask().SerializeToString())
        assert self.call(server, body, end=False)[0] == 0

    def test_text_metadata_must_be_ascii(self, server: GrpcThread) -> None:
        body = framed(ask().SerializeToString())
        for value in ("é".encode(), b"\xff\xfe"):
            code, message = self.call(server, body, [(b"x-note", value)])
            assert code == INVALID.value[0] and "'x-note'" in message
        assert self.call(server, body, [(b"x-note-bin", b"/v8="), (b"x-note", b"fine")])[0] == 0

    def test_two_messages_are_one_call(self, server: GrpcThread, fake: FakeEngineClient) -> None:
        body = framed(ask().SerializeToString())
        assert self.call(server, body + body)[0] == 0
        assert len(fake.requests) == 1
