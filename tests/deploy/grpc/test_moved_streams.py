"""Streams whose engine is lost on the way go on elsewhere; when none is left, they say so."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest

from expertmesh.actors.model.config import load_config
from expertmesh.deploy import replica_link
from expertmesh.deploy.edge_settings import EdgeSettings, GrpcSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.describe import describe
from expertmesh.deploy.ray_client import RayEngineClient
from expertmesh.deploy.rpc.server import GrpcServer
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.deploy.test_moved_answers import started, wait
from tests.support.fake_replica import FakeMesh
from tests.support.grpc_calls import Answer, ask
from tests.support.http_server import free_port

REQUESTS = [
    ask("hello world", max_tokens=100, logprobs=2, ignore_eos=True),
    ask([5] * 130, temperature=0.7, seed=1, n=2, max_tokens=100, ignore_eos=True),
    ask("whole", temperature=0.9, seed=3, max_tokens=100, ignore_eos=True, stream=False),
    ask("traced", seed=3, max_tokens=100, ignore_eos=True, return_routed_experts=True),
]


async def everything(engine: EngineStub) -> list[tuple[str, bytes]]:
    """(text, the whole end) of each choice. Without what was found in a cache: the same request
    finds more the second time."""

    async def one(request: pb.GenerateRequest) -> list[tuple[str, bytes]]:
        answer = Answer([message async for message in engine.Generate(request, timeout=90)])
        found = []
        for index, end in sorted(answer.ends.items()):
            end.ClearField("cached_tokens")
            found.append((answer.text(index), end.SerializeToString(deterministic=True)))
        return found

    answers = await asyncio.gather(*[one(request) for request in REQUESTS])
    return [choice for answer in answers for choice in answer]


def test_a_lost_engine_leaves_no_trace_and_the_last_one_an_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "LOOK_SECONDS", 0.05)

    async def main() -> None:
        mesh = FakeMesh(r0=await started(checkpoint), r1=await started(checkpoint))
        client = RayEngineClient(mesh.read, mesh.find, hold_s=0.2, patience_s=0.1)
        edge = EdgeSettings(grpc=GrpcSettings(port=free_port()))
        served = describe(checkpoint, load_config(checkpoint), name="tiny")
        server = GrpcServer(Front(client, served, edge), edge.grpc, "127.0.0.1")
        client.start()
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.grpc.port}") as channel:
            engine = EngineStub(channel)

            async def healthy() -> pb.HealthCheckResponse:
                return await engine.HealthCheck(pb.HealthCheckRequest(), timeout=10)

            assert not (await healthy()).healthy, "nothing is connected yet"
            await wait(lambda: len(client._up()) == 2)
            want = await everything(engine)
            answers = asyncio.create_task(everything(engine))
            await wait(lambda: sum(len(one.ids) for one in client._requests.values()) > 40)
            assert client._links["r0"].requests, "something is to be lost"
            await mesh.replicas.pop("r0").kill()
            mesh.publish()
            assert await answers == want

            call = engine.Generate(ask("x", max_tokens=900, ignore_eos=True), timeout=90)
            await anext(aiter(call))
            await mesh.replicas.pop("r1").kill()
            mesh.publish()
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                async for _ in call:
                    pass
            assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "no replica within 0.2 s" in str(failed.value.details())
            health = await healthy()
            assert not health.healthy and health.message
            assert not client._requests
        await server.stop(0)
        await client.stop()

    asyncio.run(asyncio.wait_for(main(), 170))
