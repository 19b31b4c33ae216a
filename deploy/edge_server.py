"""HTTP and gRPC of one front door: started together, drained together."""

import asyncio
import socket
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from expertmesh.deploy.front import Front
from expertmesh.deploy.listener import http_server

if TYPE_CHECKING:
    from expertmesh.deploy.grpc.server import GrpcServer


class EdgeServer:
    """Serves `app` on a bound socket, and the engine protocol beside it if that has a port.

    grace_seconds: how long running answers may go on after a stop.
    """

    def __init__(
        self, front: Front, app: ASGIApp, host: str, grace_seconds: int, lifespan: bool = True
    ) -> None:
        self._front, self._host, self._grace = front, host, grace_seconds
        self._http = http_server(app, grace_seconds, lifespan, front.edge.http.tls)
        self._grpc: GrpcServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket) -> None:
        """Returns when both doors are open. Raises OSError when the gRPC port is taken."""
        if self._front.edge.grpc.port is not None:
            from expertmesh.deploy.grpc.server import GrpcServer

            self._grpc = GrpcServer(self._front, self._front.edge.grpc, self._host)
            await self._grpc.start()
        self._task = asyncio.create_task(self._http.serve(sockets=[listener]))
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0.005)

    @property
    def ended(self) -> bool:
        """Whether the listener has gone, by a stop or by failure."""
        return self._task is not None and self._task.done()

    def stop(self) -> None:
        """No new work; what runs gets the grace time. Returns at once; see `wait`."""
        self._front.draining = True
        self._http.should_exit = True

    async def wait(self) -> None:
        """Returns when the server has stopped and every answer has ended."""
        assert self._task is not None, "start first"
        while not (self._http.should_exit or self._task.done()):
            await asyncio.sleep(0.05)
        work = [self._task]
        if self._grpc is not None:
            work.append(asyncio.create_task(self._grpc.stop(self._grace)))
        await asyncio.gather(*work)
