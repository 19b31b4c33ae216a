"""HTTP and gRPC of one front door: started together, drained together."""

import asyncio
import socket
import time
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from expertmesh.deploy.front import Front
from expertmesh.deploy.listener import allow_connections, http_server

if TYPE_CHECKING:
    from expertmesh.deploy.rpc.server import GrpcServer


async def open_grpc(front: Front, host: str) -> "GrpcServer | None":
    """The engine protocol's running server; None when it has no port. Raises OSError when the port
    is taken. host: of HTTP, for settings that name none."""
    if front.edge.grpc.port is None:
        return None
    from expertmesh.deploy.rpc.server import GrpcServer

    server = GrpcServer(front, front.edge.grpc, front.edge.grpc.host or host)
    await server.start()
    return server


class EdgeServer:
    """Serves `app` on a bound socket, and the engine protocol beside it if that has a port.

    grace_seconds: how long running answers may go on after a stop.
    """

    def __init__(self, front: Front, app: ASGIApp, host: str, grace_seconds: int) -> None:
        self._front, self._host, self._grace = front, host, grace_seconds
        self._http = http_server(app, grace_seconds, http=front.edge.http)
        self._grpc: GrpcServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Returns when both doors are open. Raises OSError when the gRPC port is taken or TLS can
        not work, and what else keeps the app from starting."""
        allow_connections()
        self._grpc = await open_grpc(self._front, self._host)
        self._task = asyncio.create_task(self._http.serve(sockets=[listener]))
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0.005)
        if not self._http.started:
            if self._grpc is not None:
                await self._grpc.stop(0)
            await self._task
            raise RuntimeError("the HTTP server did not start")

    @property
    def ended(self) -> bool:
        """Whether the listener has gone, by a stop or by failure."""
        return self._task is not None and self._task.done()

    def stop(self) -> None:
        """No new work; what runs gets the grace time. Returns at once, also in a signal handler;
        see `wait`."""
        self._front.drain()

    async def wait(self) -> None:
        """Returns when the server has stopped and every answer has ended."""
        assert self._task is not None, "start first"
        while not (self._front.draining or self._task.done()):
            await asyncio.sleep(0.05)
        work = [asyncio.create_task(self._drain(self._task))]
        if self._grpc is not None:
            work.append(asyncio.create_task(self._grpc.stop(self._grace)))
        await asyncio.gather(*work)

    async def _drain(self, task: asyncio.Task[None]) -> None:
        """The port stays open while answers run: whoever comes is told 503 and goes elsewhere,
        where a closed port would look like a crash."""
        over = time.monotonic() + self._grace
        while self._front.traffic.requests and time.monotonic() < over and not task.done():
            await asyncio.sleep(0.05)
        # What is left of the grace is for connections that are still sending their last bytes.
        self._http.config.timeout_graceful_shutdown = max(0, round(over - time.monotonic()))
        self._http.should_exit = True
        await task
