"""What /metrics tells of gRPC: every call once, under its status; tokens as over HTTP."""

import asyncio
import re
from functools import partial

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask, refused
from tests.support.grpc_server import GrpcThread, grpc_server
from tests.support.server_process import wait_for


def counted(server: GrpcThread) -> dict[tuple[str, str], float]:
    """(method, code) -> calls"""
    text = server.call(server.front.telemetry.exposition, {}).decode()
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "expertmesh_grpc_requests_total"
    }


def value(server: GrpcThread, name: str, labels: str = "") -> float:
    text = server.call(server.front.telemetry.exposition, {}).decode()
    lines = re.findall(rf"^{name}\{{.*{labels}.*\}} (.*)$", text, re.MULTILINE)
    return sum(map(float, lines))


def test_calls_by_method_and_code(served: ServedModel) -> None:
    fake = FakeEngineClient()
    with (
        grpc_server(fake, served) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        assert counted(server) == {}, "nothing is shown before the first call"
        engine = EngineStub(channel)
        assert Answer(engine.Generate(ask(max_tokens=5, n=2))).ends
        refused(engine.Generate(ask(temperature=3)))
        engine.Abort(pb.AbortRequest(request_id="x"))
        fake.gate = asyncio.Event()
        call = engine.Generate(ask(request_id="a"))
        wait_for(lambda: fake.running == 1, 5)
        engine.Abort(pb.AbortRequest(request_id="a"))
        list(call)
        call = engine.Generate(ask(), timeout=2)
        wait_for(lambda: fake.running == 1, 2)  # what ends before it began is no cancelled answer
        with pytest.raises(grpc.RpcError):
            list(call)
        wait_for(lambda: fake.running == 0, 5)
        call = engine.Generate(ask())
        wait_for(lambda: fake.running == 1, 5)
        call.cancel()
        want = {
            ("Generate", "OK"): 2.0, ("Generate", "INVALID_ARGUMENT"): 1.0, ("Abort", "OK"): 2.0,
            ("Generate", "DEADLINE_EXCEEDED"): 1.0, ("Generate", "CANCELLED"): 1.0,
        }  # fmt: skip
        wait_for(lambda: counted(server) == want, 5, lambda: str(counted(server)))
        assert value(server, "expertmesh_generation_tokens_total") == 10
        assert value(server, "expertmesh_request_success_total", "length") == 2
        assert value(server, "expertmesh_request_failures_total", "validation") == 1
        cancelled = partial(value, server, "expertmesh_request_failures_total", "cancelled")
        wait_for(lambda: cancelled() == 3, 5)  # the handler ends after its call
