"""Both doors of one house: HTTP and gRPC share limits, queue and drain."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx

from expertmesh.deploy.edge_server import EdgeServer
from expertmesh.deploy.edge_settings import EdgeSettings, GrpcSettings, QueueSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.listener import bind
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import ask
from tests.support.http_server import free_port


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def test_one_queue_and_one_drain(served: ServedModel) -> None:
    async def main() -> None:
        fake = FakeEngineClient(seconds=0.01)
        edge = EdgeSettings(grpc=GrpcSettings(port=free_port()), queue=QueueSettings(running=1))
        front = Front(fake, served, edge)
        listener = bind("127.0.0.1", 0)
        server = EdgeServer(front, build_app(front), "127.0.0.1", 20)
        await server.start(listener)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as http,
            grpc.aio.insecure_channel(f"127.0.0.1:{edge.grpc.port}") as channel,
        ):
            engine = EngineStub(channel)
            call = engine.Generate(ask(max_tokens=60), timeout=30)
            await anext(aiter(call))
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
            waiting = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(lambda: front.admission.waiting == 1)
            info = await engine.GetServerInfo(pb.GetServerInfoRequest())
            assert info.active_requests == 2
            assert (await engine.GetLoads(pb.GetLoadsRequest())).num_queued_reqs == 1
            server.stop()
            assert (await waiting).status_code == 503, "what waits goes elsewhere"
            messages = [message async for message in call]
            assert messages[-1].complete.completion_tokens == 60, "what runs may end"
            await asyncio.wait_for(server.wait(), 20)

    asyncio.run(main())
