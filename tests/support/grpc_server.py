"""The product's gRPC server around a front, in a thread of the test's process."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from expertmesh.deploy.edge_settings import EdgeSettings, GrpcSettings
from expertmesh.deploy.engine_client import EngineClient
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.served import ServedModel
from expertmesh.deploy.rpc.server import GrpcServer
from tests.support.http_server import free_port


class GrpcThread:
    """address: "127.0.0.1:PORT". `call` runs something on the server's event loop."""

    def __init__(self, client: EngineClient, served: ServedModel, edge: EdgeSettings) -> None:
        self.front = Front(client, served, edge)
        self.address = f"127.0.0.1:{edge.grpc.port}"
        self.server = GrpcServer(self.front, edge.grpc, "127.0.0.1")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self.submit(self.server.start()).result(30)
        except BaseException:
            self._end()
            raise

    def submit(self, work: Any) -> Future[Any]:
        """A coroutine, on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Any, *arguments: Any) -> Any:
        """A plain function, on the server's loop."""

        async def run() -> Any:
            return function(*arguments)

        return self.submit(run()).result(10)

    def stop(self, grace: float = 0.0) -> None:
        if not self._loop.is_closed():
            self.submit(self.server.stop(grace)).result(30)
            self._end()

    def _end(self) -> None:
        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(cancel_all()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()


@contextmanager
def grpc_server(
    client: EngineClient, served: ServedModel, *, edge: EdgeSettings | None = None, **settings: Any
) -> Iterator[GrpcThread]:
    """settings: of GrpcSettings; the port is a free one unless given."""
    edge = edge or EdgeSettings()
    grpc = GrpcSettings.model_validate({"port": free_port()} | settings)
    server = GrpcThread(client, served, edge.model_copy(update={"grpc": grpc}))
    try:
        yield server
    finally:
        server.stop()
