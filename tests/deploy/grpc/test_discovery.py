"""What a stranger with nothing but the port finds: services, their methods, and health."""

import contextlib
import io
import textwrap
import threading

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc import server
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import ENGINE
from tests.support.grpc_server import GrpcThread, grpc_server
from tests.support.server_process import wait_for

HEALTH = "grpc.health.v1.Health"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class TestReflection:
    def test_everything_is_listed_and_described(self, channel: grpc.Channel) -> None:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert services == {ENGINE, HEALTH, "grpc.reflection.v1alpha.ServerReflection"}
        pool = DescriptorPool(database)
        for service in services:
            for method in pool.FindServiceByName(service).methods:
                assert method.input_type.full_name and method.output_type.full_name
        methods = {method.name for method in pool.FindServiceByName(ENGINE).methods}
        assert methods == {
            "Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads",
        }  # fmt: skip

    def test_a_call_needs_nothing_else(self, channel: grpc.Channel, fake: FakeEngineClient) -> None:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(ENGINE).FindMethodByName("Generate")
        request = GetMessageClass(method.input_type)()
        request.text = "hello"
        request.sampling_params.max_tokens = 3
        call = channel.unary_stream(
            f"/{ENGINE}/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        messages = list(call(request, timeout=10))
        assert messages[-1].complete.finish_reason == "length"
        assert messages[-1].complete.completion_tokens == 3

    def test_it_can_be_switched_off(self, served: ServedModel) -> None:
        with (
            grpc_server(FakeEngineClient(), served, reflection=False) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            with pytest.raises(grpc.RpcError) as failed:
                ProtoReflectionDescriptorDatabase(channel).get_services()
            assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert check(channel, ENGINE) == SERVING


def check(channel: grpc.Channel, service: str) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status)


def test_the_example_of_the_documentation(
    channel: grpc.Channel, fake_grpc: tuple[FakeEngineClient, GrpcThread], fake: FakeEngineClient
) -> None:
    assert server.__doc__ is not None
    code = textwrap.dedent(server.__doc__.partition("\n\n")[2].partition("\n\nOther")[0])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code.replace("127.0.0.1:50051", fake_grpc[1].address))
    assert printed.getvalue() == ("Once upon a time" * 40)[: len(printed.getvalue())] != ""


class Watcher:
    """Collects the states of a Watch in a thread. `ended`: the status it ended with."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        request = health_pb2.HealthCheckRequest(service=service)
        self.call = health_pb2_grpc.HealthStub(channel).Watch(request)
        self.states: list[int] = []
        self.ended: grpc.StatusCode | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for answer in self.call:
                self.states.append(answer.status)
        except grpc.RpcError:
            pass
        self.ended = self.call.code()

    def wait(self, *states: int) -> None:
        wait_for(lambda: self.states == list(states), 10, lambda: str(self.states))


class TestHealth:
    def test_live_is_not_ready(self, channel: grpc.Channel, fake: FakeEngineClient) -> None:
        assert [check(channel, ""), check(channel, ENGINE)] == [SERVING, SERVING]
        fake.down = "loading"
        assert [check(channel, ""), check(channel, ENGINE)] == [SERVING, NOT_SERVING]
        fake.down = ""
        assert check(channel, ENGINE) == SERVING

    def test_what_is_not_there(self, channel: grpc.Channel) -> None:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("nothing", ENGINE + "/", "expertmesh.v1"):
            with pytest.raises(grpc.RpcError) as failed:
                stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert failed.value.code() is grpc.StatusCode.NOT_FOUND

    def test_all_at_once(self, channel: grpc.Channel, fake: FakeEngineClient) -> None:
        fake.down = "loading"
        stub = health_pb2_grpc.HealthStub(channel)
        found = stub.List(health_pb2.HealthListRequest(), timeout=10).statuses
        assert {name: one.status for name, one in found.items()} == {
            "": SERVING,
            ENGINE: NOT_SERVING,
        }

    def test_watching(self, channel: grpc.Channel, fake: FakeEngineClient) -> None:
        watcher, other = Watcher(channel, ENGINE), Watcher(channel, "nothing")
        watcher.wait(SERVING)
        other.wait(UNKNOWN)
        fake.down = "no replica"
        watcher.wait(SERVING, NOT_SERVING)
        fake.down = ""
        watcher.wait(SERVING, NOT_SERVING, SERVING)
        watcher.call.cancel()
        wait_for(lambda: watcher.ended is grpc.StatusCode.CANCELLED, 5)
        assert other.ended is None
        other.call.cancel()

    def test_draining(self, served: ServedModel) -> None:
        fake = FakeEngineClient(seconds=0.01)
        with (
            grpc_server(fake, served) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            watcher = Watcher(channel, ENGINE)
            watcher.wait(SERVING)
            call = channel.unary_stream(f"/{ENGINE}/Generate")(
                pb.GenerateRequest(
                    text="hi", sampling_params=pb.SamplingParams(max_tokens=80)
                ).SerializeToString()
            )
            next(call)
            stopping = threading.Thread(target=server.stop, args=(30,))
            stopping.start()
            watcher.wait(SERVING, NOT_SERVING)
            assert [check(channel, ""), check(channel, ENGINE)] == [SERVING, NOT_SERVING]
            assert len(list(call)) > 1 and call.code() is grpc.StatusCode.OK
            stopping.join(20)
            assert not stopping.is_alive(), "a Watch must not hold the drain up"
            wait_for(lambda: watcher.ended is grpc.StatusCode.OK, 5)

    def test_before_anything_is_loaded(self, served: ServedModel) -> None:
        fake = FakeEngineClient()
        fake.down = "the mesh has not been found yet"
        with (
            grpc_server(fake, served) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            assert [check(channel, ""), check(channel, ENGINE)] == [SERVING, NOT_SERVING]
