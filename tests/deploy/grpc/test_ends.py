"""Ways a call ends before its answer does: Abort, cancel, deadline, a client that is gone."""

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from expertmesh.deploy.edge_settings import EdgeSettings, QueueSettings
from expertmesh.deploy.one_process import LocalServer
from expertmesh.deploy.openai.served import Limits, ServedModel
from expertmesh.deploy.rpc.pipe import Pipe
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused
from tests.support.grpc_server import GrpcThread, grpc_server
from tests.support.raw_grpc import RawChannel, framed
from tests.support.server_process import wait_for

GENERATE = "/expertmesh.v1.Engine/Generate"


def abort(engine: EngineStub, request_id: str) -> int:
    return engine.Abort(pb.AbortRequest(request_id=request_id), timeout=10).aborted


def idle(server: GrpcThread, fake: FakeEngineClient) -> Callable[[], bool]:
    front = server.front
    return lambda: not (fake.running or front.traffic.requests or front.traffic.streams)


class TestAbort:
    def test_of_a_stream_from_another_channel(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        fake.seconds = 0.01
        call = engine.Generate(ask(request_id="a", max_tokens=900), timeout=30)
        first = next(call)
        with grpc.insecure_channel(server.address) as other:
            assert abort(EngineStub(other), "a") == 1
        answer = Answer([first, *call])
        assert answer.ends[0].finish_reason == "abort" and answer.text()
        assert call.code() is grpc.StatusCode.OK
        wait_for(idle(server, fake), 5)
        assert len(fake.aborted) == 1
        assert abort(engine, "a") == 0, "it has ended"

    def test_before_the_first_token_and_twice(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        fake.gate = asyncio.Event()  # a prefill that never ends
        call = engine.Generate(ask(request_id="a", n=3), timeout=30)
        wait_for(lambda: fake.running == 3, 5)
        assert [abort(engine, "a"), abort(engine, "a")] == [1, 0]
        answer = Answer(call)
        assert {end.finish_reason for end in answer.ends.values()} == {"abort"}
        assert sorted(answer.ends) == [0, 1, 2]
        wait_for(idle(server, fake), 5)

    def test_of_an_unknown_id_is_no_error(self, engine: EngineStub) -> None:
        assert [abort(engine, "nobody"), abort(engine, ""), abort(engine, "é" * 999)] == [0, 0, 0]

    def test_of_two_calls_with_one_id(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        fake.gate = asyncio.Event()
        calls = [engine.Generate(ask(text, request_id="a"), timeout=30) for text in ("ab", "cd")]
        wait_for(lambda: fake.running == 2, 5)
        assert abort(engine, "a") == 2
        assert [Answer(call).ends[0].finish_reason for call in calls] == ["abort", "abort"]

    def test_two_calls_with_one_id_do_not_mix(
        self, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        fake.seconds = 0.002
        calls = [
            engine.Generate(ask(text, request_id="a", max_tokens=20), timeout=30)
            for text in ("ab", "cd")
        ]
        assert [Answer(call).text() for call in calls] == ["ab" * 10, "cd" * 10]

    def test_of_a_call_that_waits_for_its_turn(self, served: ServedModel) -> None:
        fake = FakeEngineClient(seconds=0.01)
        edge = EdgeSettings(queue=QueueSettings(running=1))
        with (
            grpc_server(fake, served, edge=edge) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            engine = EngineStub(channel)
            running = engine.Generate(ask(request_id="r", max_tokens=900), timeout=30)
            next(running)
            waiting = engine.Generate(ask(request_id="w"), timeout=30)
            wait_for(lambda: server.front.admission.waiting == 1, 5)
            assert engine.GetLoads(pb.GetLoadsRequest()).num_queued_reqs == 1
            assert abort(engine, "w") == 1
            assert Answer(waiting).ends[0].finish_reason == "abort"
            assert server.front.admission.waiting == 0 and fake.running == 1
            running.cancel()
            wait_for(idle(server, fake), 5)

    def test_of_a_reader_that_reads_nothing(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        """The engine is free at once, whatever the client does."""
        body = framed(ask(request_id="a", max_tokens=900, logprobs=20).SerializeToString())
        with RawChannel(server.address) as raw:
            raw.send(GENERATE, body)  # and the windows fill up
            wait_for(lambda: fake.running == 1, 5)
            fake.gate = asyncio.Event()
            assert abort(engine, "a") == 1
            wait_for(lambda: fake.running == 0, 5)

    def test_of_the_real_engine(self, real_engine: EngineStub, local_server: LocalServer) -> None:
        call = real_engine.Generate(
            ask(request_id="a", max_tokens=900, ignore_eos=True), timeout=60
        )
        next(call)
        assert abort(real_engine, "a") == 1
        assert list(call)[-1].complete.finish_reason == "abort"
        stats = local_server.engine_loop.engine.stats
        wait_for(lambda: stats().slots_free == stats().slots_total, 5)


class TestDeadlines:
    @pytest.mark.parametrize("gated", [True, False])
    def test_a_deadline_frees_everything(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient, gated: bool
    ) -> None:
        fake.seconds, fake.gate = 0.01, asyncio.Event() if gated else None
        with pytest.raises(grpc.RpcError) as failed:
            list(engine.Generate(ask(max_tokens=900), timeout=0.3))
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(idle(server, fake), 5)
        assert len(fake.aborted) == 1

    def test_the_server_counts_it_for_a_client_that_is_gone(
        self, server: GrpcThread, fake: FakeEngineClient
    ) -> None:
        fake.gate = asyncio.Event()
        body = framed(ask().SerializeToString())
        with RawChannel(server.address) as raw:
            raw.send(GENERATE, body, [(b"grpc-timeout", b"300m")])
            wait_for(lambda: fake.running == 1, 5)
            wait_for(idle(server, fake), 5)

    def test_the_server_s_own_limit(self, served: ServedModel) -> None:
        fake = FakeEngineClient(seconds=0.01)
        limits = Limits(request_seconds=0.2)
        with (
            grpc_server(fake, replace(served, limits=limits)) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            with pytest.raises(grpc.RpcError) as failed:
                list(EngineStub(channel).Generate(ask(max_tokens=900), timeout=30))
            assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "longer than this server allows" in failed.value.details()
            wait_for(idle(server, fake), 5)

    def test_a_message_that_does_not_come(self, served: ServedModel) -> None:
        strict = replace(served, limits=Limits(upload_seconds=0.1))
        with grpc_server(FakeEngineClient(), strict) as server, RawChannel(server.address) as raw:
            code, message = raw.call(GENERATE, None, end=False)
        assert code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0] and "0.1 s" in message

    def test_an_absurd_deadline(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        code, _, _ = refused(engine.Generate(ask(), timeout=1e-9))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        # The call may have reached the server even so: the next one comes behind it.
        assert Answer(engine.Generate(ask(), timeout=1e9)).ends
        wait_for(idle(server, fake), 5)


class TestGone:
    def test_a_cancelled_call(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        fake.seconds = 0.01
        call = engine.Generate(ask(max_tokens=900), timeout=30)
        next(call)
        call.cancel()
        wait_for(idle(server, fake), 5)
        assert len(fake.aborted) == 1

    @pytest.mark.parametrize("way", ["close", "reset"])
    def test_a_connection_that_is_cut(
        self, server: GrpcThread, fake: FakeEngineClient, way: str
    ) -> None:
        fake.gate = asyncio.Event()
        with RawChannel(server.address) as raw:
            body = framed(ask(n=2).SerializeToString())
            streams = [raw.send(GENERATE, body) for _ in range(3)]
            wait_for(lambda: fake.running == 6, 5)
            if way == "reset":
                for stream in streams:
                    raw.http.reset_stream(stream, 8)
                raw.flush()
                wait_for(idle(server, fake), 5)
        wait_for(idle(server, fake), 5)

    @pytest.mark.parametrize("answered", [True, False])
    def test_a_client_that_vanishes_without_a_word(
        self, served: ServedModel, answered: bool
    ) -> None:
        """It answers no ping (more), as behind a cut cable; its calls end with the connection."""
        fake = FakeEngineClient()
        fake.gate = asyncio.Event()
        with (
            grpc_server(fake, served, keepalive_s=0.3) as server,
            RawChannel(server.address) as raw,
        ):
            raw.send(GENERATE, framed(ask().SerializeToString()))
            wait_for(lambda: fake.running == 1, 5)
            while answered and raw.pings < 2:  # the first measures bandwidth
                raw.events(5)
            wait_for(idle(server, fake), 10)

    def test_a_hundred_streams_with_random_ends_leave_nothing(
        self, real_grpc: GrpcThread, real_engine: EngineStub, local_server: LocalServer
    ) -> None:
        chance = random.Random(7)

        async def one(stub: Any, number: int) -> str:
            request = ask([number], request_id=f"r{number}", max_tokens=chance.randint(1, 30))
            call = stub.Generate(request, timeout=chance.choice([0.05, 60, 60]))
            cut = chance.choice(["cancel", "abort", "none", "none"])
            after, seen = chance.randint(0, 8), 0
            try:
                async for _ in call:
                    seen += 1
                    if seen == after and cut == "cancel":
                        call.cancel()
                    elif seen == after and cut == "abort":
                        await stub.Abort(pb.AbortRequest(request_id=f"r{number}"))
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass
            return str((await call.code()).name)

        async def main() -> list[str]:
            async with grpc.aio.insecure_channel(real_grpc.address) as channel:
                stub = EngineStub(channel)
                return await asyncio.gather(*[one(stub, number) for number in range(100)])

        codes = set(asyncio.run(main()))
        assert codes <= {"OK", "CANCELLED", "DEADLINE_EXCEEDED"} and len(codes) > 1
        stats = local_server.engine_loop.engine.stats
        wait_for(lambda: stats().running + stats().waiting == 0, 20)
        assert real_grpc.front.traffic.requests == real_grpc.front.traffic.streams == 0


class TestSlowReaders:
    def test_what_a_slow_reader_has_not_taken_merges(
        self, engine: EngineStub, server: GrpcThread, fake: FakeEngineClient
    ) -> None:
        """The answer waits as tokens, not as messages, and arrives whole."""
        before = fake.counters.generation_tokens
        with RawChannel(server.address) as raw:
            request = ask([65], max_tokens=900, logprobs=20)
            stream = raw.send(GENERATE, framed(request.SerializeToString()))
            wait_for(lambda: fake.counters.generation_tokens - before >= 900, 20)
            assert raw.status(stream) == (0, "")

    @pytest.mark.parametrize("n", [1, 4])
    def test_an_abort_ends_it_with_what_was_sent(
        self, server: GrpcThread, engine: EngineStub, fake: FakeEngineClient, n: int
    ) -> None:
        """What waits in the server when the end comes is neither lost nor counted twice."""
        request = ask([65], request_id="slow", max_tokens=900, logprobs=20, n=n)
        fake.seconds, before = 0.0005, fake.counters.generation_tokens
        call = engine.Generate(request, timeout=60)
        first = next(call)
        wait_for(lambda: fake.counters.generation_tokens - before >= 600 * n, 20)
        assert abort(engine, "slow") == 1
        answer = Answer([first, *call])
        assert sorted(answer.ends) == list(range(n))
        for index, end in answer.ends.items():
            answer.text(index)
            assert end.finish_reason == "abort"

    def test_a_pipe_is_bounded_and_ends(self) -> None:
        async def main() -> None:
            pipe: Pipe[int] = Pipe(2)
            pipe.push(1)
            await pipe.room()
            pipe.push(2)
            waiting = asyncio.create_task(pipe.room())
            await asyncio.sleep(0)
            assert not waiting.done()
            got = []
            with pytest.raises(ValueError, match="the end"):
                async for item in pipe:
                    got.append(item)
                    if item == 1:
                        await waiting
                        pipe.push(3)
                    if item == 3:
                        pipe.close(ValueError("the end"))
                        pipe.close()
            assert got == [1, 2, 3]

        asyncio.run(main())


class TestDrain:
    def test_running_streams_end_and_new_calls_are_told(self, served: ServedModel) -> None:
        fake = FakeEngineClient(seconds=0.01)
        with (
            grpc_server(fake, served) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            engine = EngineStub(channel)
            call = engine.Generate(ask(max_tokens=60), timeout=30)
            first = next(call)
            stopping = threading.Thread(target=server.stop, args=(20,))
            stopping.start()
            wait_for(lambda: server.front.draining, 5)
            code, message, details = refused(engine.Generate(ask(), timeout=10))
            assert code is grpc.StatusCode.UNAVAILABLE and "stopping" in message
            assert "RetryInfo" in details
            assert engine.GetServerInfo(pb.GetServerInfoRequest()).draining
            assert Answer([first, *call]).ends[0].finish_reason == "length"
            stopping.join(20)
            assert not stopping.is_alive()
            with pytest.raises(grpc.RpcError) as failed:
                engine.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE

    def test_what_runs_longer_than_the_grace_is_told_so(self, served: ServedModel) -> None:
        fake = FakeEngineClient(seconds=0.01)
        with (
            grpc_server(fake, served) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            call = EngineStub(channel).Generate(ask(max_tokens=900), timeout=30)
            next(call)
            server.stop(0.2)
            with pytest.raises(grpc.RpcError) as failed:
                list(call)
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "the server is stopping" in failed.value.details()
            assert not fake.running
