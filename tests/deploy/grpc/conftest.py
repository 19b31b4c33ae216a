"""Two gRPC servers: one over a scripted client, one over a tiny real model beside HTTP."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from expertmesh.deploy.one_process import LocalServer
from expertmesh.deploy.openai.describe import describe
from expertmesh.deploy.openai.served import Limits, ServedModel
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1 import engine_pb2_grpc
from tests.support.fake_client import FakeEngineClient, echo_prompt
from tests.support.grpc_server import GrpcThread, grpc_server


@pytest.fixture(scope="session")
def fake_grpc(served: ServedModel) -> Iterator[tuple[FakeEngineClient, GrpcThread]]:
    client = FakeEngineClient(vocab_size=served.vocab_size, eos=frozenset({served.vocab_size - 14}))
    with grpc_server(client, replace(served, limits=Limits(requests=64))) as server:
        yield client, server


@pytest.fixture
def fake(fake_grpc: tuple[FakeEngineClient, GrpcThread]) -> FakeEngineClient:
    """The scripted client, its knobs reset."""
    client = fake_grpc[0]
    client.script, client.seconds, client.fail_after = echo_prompt, 0.0, None
    client.down, client.refuse, client.gate = "", None, None
    client.cached, client.kv = lambda request: 0, None
    client.requests.clear()
    client.aborted.clear()
    return client


@pytest.fixture
def server(fake: FakeEngineClient, fake_grpc: tuple[FakeEngineClient, GrpcThread]) -> GrpcThread:
    return fake_grpc[1]


@pytest.fixture
def channel(server: GrpcThread) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def engine(channel: grpc.Channel) -> engine_pb2_grpc.EngineStub:
    return engine_pb2_grpc.EngineStub(channel)


@pytest.fixture(scope="session")
def real_grpc(checkpoint: Path, local_server: LocalServer) -> Iterator[GrpcThread]:
    info = describe(checkpoint, local_server.config, max_model_len=1024)
    with grpc_server(local_server.client, info) as server:
        yield server


@pytest.fixture
def real_engine(
    real_grpc: GrpcThread, local_server: LocalServer
) -> Iterator[engine_pb2_grpc.EngineStub]:
    """A stub for the tiny model. Afterwards the engine must be as empty as before."""
    with grpc.insecure_channel(real_grpc.address) as channel:
        engine = engine_pb2_grpc.EngineStub(channel)
        request = pb.GenerateRequest(text="The next ordinary request", sampling_params=GREEDY)
        before = list(engine.Generate(request, timeout=30))[-1].complete.text
        yield engine
        assert list(engine.Generate(request, timeout=30))[-1].complete.text == before
        stats = local_server.engine_loop.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)


GREEDY = pb.SamplingParams(temperature=0, max_tokens=4)
