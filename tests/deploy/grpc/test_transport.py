"""Limits and options of the port, each seen by its effect: grpcio ignores unknown names."""

import asyncio
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import grpc.aio
import h2.events
import h2.settings
import pytest

from expertmesh.deploy.listener import hold
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused
from tests.support.grpc_server import GrpcThread, grpc_server
from tests.support.http_server import free_port
from tests.support.raw_grpc import RawChannel, framed
from tests.support.server_process import wait_for

GENERATE = "/expertmesh.v1.Engine/Generate"
MEGABYTE = 1_000_000
TOO_MUCH = 11  # ENHANCE_YOUR_CALM, of which grpc makes "too_many_pings"


@pytest.fixture(scope="module")
def small(served: ServedModel) -> Iterator[EngineStub]:
    """Of a server with a low limit."""
    with (
        grpc_server(FakeEngineClient(), served, message_bytes=20_000) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        yield EngineStub(channel)


class TestSizes:
    """grpcio's own limit is 4 MiB."""

    @pytest.mark.parametrize("megabytes", [3.9, 4.1, 16])
    @pytest.mark.parametrize("kind", ["text", "tokenized"])
    def test_below_the_limit_only_the_context_counts(
        self, engine: EngineStub, megabytes: float, kind: str
    ) -> None:
        size = int(megabytes * MEGABYTE)
        request = ask("x" * size) if kind == "text" else ask([300] * (size // 2))
        code, message, details = refused(engine.Generate(request, timeout=60))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "the context holds 1024" in message
        assert details["ErrorInfo"].reason == "CONTEXT_LENGTH_EXCEEDED"

    def test_above_it_the_limit_is_named(self, engine: EngineStub) -> None:
        code, message, _ = refused(engine.Generate(ask("x" * (68 * MEGABYTE)), timeout=60))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and str(64 << 20) in message

    def test_a_long_prompt_is_served_where_the_context_holds_it(self, served: ServedModel) -> None:
        fake, count = FakeEngineClient(), 2_200_000
        with (
            grpc_server(fake, replace(served, max_model_len=3 << 20)) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            request = ask([200] * count, max_tokens=3)
            assert len(request.SerializeToString()) > 4 << 20
            answer = Answer(EngineStub(channel).Generate(request, timeout=60))
            assert answer.ends[0].prompt_tokens == count

    def test_a_message_that_inflates_beyond_it(self, small: EngineStub) -> None:
        request = ask("x" * 20_001)
        call = small.Generate(request, timeout=30, compression=grpc.Compression.Gzip)
        code, message, _ = refused(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message
        fits = small.Generate(ask("x"), timeout=30, compression=grpc.Compression.Gzip)
        assert Answer(fits).ends

    def test_an_answer_beyond_it(self, small: EngineStub) -> None:
        fields = {"max_tokens": 400, "logprobs": 20}
        code, message, _ = refused(small.Generate(ask(stream=False, **fields), timeout=30))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "at most 20000" in message and "grpc.message_bytes" in message
        assert Answer(small.Generate(ask(stream=False), timeout=30)).ends


class TestPings:
    def pinged(self, raw: RawChannel, count: int, every: float) -> list[int | None]:
        """Error codes of the GOAWAYs that so many pings brought."""
        found = []
        for number in range(count):
            raw.http.ping(number.to_bytes(8))
            raw.flush()
            until = time.monotonic() + every
            while (left := until - time.monotonic()) > 0:
                for event in raw.events(left):
                    if isinstance(event, h2.events.ConnectionTerminated):
                        return [*found, event.error_code]
        return found

    def test_a_silent_stream_outlives_the_pings_that_clients_may_send(
        self, served: ServedModel
    ) -> None:
        """A prefill of minutes: nothing is sent, and the client asks whether anybody is there."""
        fake = FakeEngineClient()
        fake.gate = asyncio.Event()
        with (
            grpc_server(fake, served, min_ping_interval_s=0.2) as server,
            RawChannel(server.address) as raw,
        ):
            stream = raw.send(GENERATE, framed(ask().SerializeToString()))
            assert self.pinged(raw, 8, 0.2) == []
            server.call(fake.gate.set)
            assert raw.status(stream) == (0, "")
            assert self.pinged(raw, 6, 0.2) == [], "also without a call"
            assert self.pinged(raw, 20, 0.01) == [TOO_MUCH], "or the option does nothing"

    def test_grpcio_s_own_keepalive(self, served: ServedModel) -> None:
        options = [
            ("grpc.keepalive_time_ms", 1000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        fake = FakeEngineClient()
        fake.gate = asyncio.Event()
        with (
            grpc_server(fake, served, min_ping_interval_s=1) as server,
            grpc.insecure_channel(server.address, options) as channel,
        ):
            call = EngineStub(channel).Generate(ask(), timeout=30)
            wait_for(lambda: fake.running == 1, 5)
            time.sleep(4.2)  # grpcio pings at most once a second, and the third too many kills
            server.call(fake.gate.set)
            assert Answer(call).ends[0].finish_reason == "length"

    def test_the_server_pings_a_silent_client(self, served: ServedModel) -> None:
        with (
            grpc_server(FakeEngineClient(), served, keepalive_s=0.1) as server,
            RawChannel(server.address) as raw,
        ):
            until = time.monotonic() + 10
            while raw.pings < 5:  # far more than two: also without data in between
                assert time.monotonic() < until
                raw.events(0.5)


class TestConnections:
    def test_streams_of_one_connection_are_bounded(self, served: ServedModel) -> None:
        fake = FakeEngineClient()
        with grpc_server(fake, served, max_streams=3) as server:
            with RawChannel(server.address) as raw:
                changed = [
                    event
                    for event in raw.events(5)
                    if isinstance(event, h2.events.RemoteSettingsChanged)
                ]
                most = changed[0].changed_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS]
                assert most.new_value == 3
            assert asyncio.run(self.storm(server, fake)) == {"OK"}
            assert len(fake.requests) == 240

    async def storm(self, server: GrpcThread, fake: FakeEngineClient) -> set[str]:
        """Codes of 20 times 12 calls on one connection. No more than three ever run at once, and
        none is refused because the stream before it is still being put away."""
        async with grpc.aio.insecure_channel(server.address) as channel:
            engine = EngineStub(channel)
            await engine.HealthCheck(pb.HealthCheckRequest())  # until then it knows no limit

            async def one() -> str:
                call = engine.Generate(ask(), timeout=30)
                try:
                    async for _ in call:
                        assert fake.running <= 3
                except grpc.aio.AioRpcError as error:
                    return f"{error.code()} {error.details()}"
                return str((await call.code()).name)

            codes: set[str] = set()
            for _ in range(20):
                codes.update(await asyncio.gather(*[one() for _ in range(12)]))
            return codes

    def test_many_connections(self, server: GrpcThread) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.insecure_channel(server.address, options) for _ in range(20)]
        calls = [EngineStub(channel).Generate(ask(), timeout=30) for channel in channels]
        assert all(Answer(call).ends for call in calls)
        for channel in channels:
            channel.close()

    def test_one_after_another_in_compressed_messages(self, engine: EngineStub) -> None:
        for algorithm in (grpc.Compression.Deflate, grpc.Compression.Gzip):
            call = engine.Generate(ask("a" * 500), compression=algorithm)
            assert Answer(call).ends[0].prompt_tokens > 1

    def test_a_huge_head_does_not_hurt_the_next_call(
        self, server: GrpcThread, engine: EngineStub
    ) -> None:
        call = engine.Generate(ask(), metadata=[("x-big", "a" * 100_000)], timeout=10)
        assert refused(call)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert Answer(engine.Generate(ask(), timeout=10)).ends


class TestPort:
    def test_a_taken_port_is_named(self, served: ServedModel) -> None:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            port = owner.getsockname()[1]
            with (
                pytest.raises(OSError, match=f"127.0.0.1:{port}"),
                grpc_server(FakeEngineClient(), served, port=port),
            ):
                pass

    def test_beside_the_command_s_hold(self, served: ServedModel) -> None:
        port = free_port()
        with (
            hold("127.0.0.1", port),
            grpc_server(FakeEngineClient(), served, port=port) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            assert EngineStub(channel).HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy

    def test_a_stop_before_the_start_is_no_error(self, served: ServedModel) -> None:
        with grpc_server(FakeEngineClient(), served) as server:
            server.stop()
            server.stop()
