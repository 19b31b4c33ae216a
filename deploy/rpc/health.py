"""grpc.health.v1: "" is this process (live), the engine's service is whether it would answer.

Loading, a mesh that can not serve, and draining are NOT_SERVING of the service alone: whoever
restarts what is not live must not restart what loads.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from expertmesh.deploy.front import Front
from expertmesh.deploy.rpc.methods import Context
from expertmesh.deploy.rpc.service import SERVICE

LIVE = ""
# Between two looks of a Watch. Nobody watching costs nothing.
LOOK_SECONDS = 0.1

_Answer = health_pb2.HealthCheckResponse
_SERVING, _NOT_SERVING = _Answer(status=_Answer.SERVING), _Answer(status=_Answer.NOT_SERVING)
_UNKNOWN = _Answer(status=_Answer.SERVICE_UNKNOWN)


class HealthService(health_pb2_grpc.HealthServicer):
    """Status as of the moment it is asked for."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._stopped = asyncio.Event()

    def status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service == LIVE:
            return _SERVING
        if service != SERVICE:
            return _UNKNOWN
        return _SERVING if self._front.ready()[0] else _NOT_SERVING

    async def Check(  # type: ignore[override]
        self,
        request: health_pb2.HealthCheckRequest,
        context: Context,
    ) -> health_pb2.HealthCheckResponse:
        status = self.status(request.service)
        if status is _UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service is here")
        return status

    async def List(self, request: Any, context: Context) -> Any:
        statuses = {service: self.status(service) for service in (LIVE, SERVICE)}
        # The published type stubs end before this method.
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]

    async def Watch(  # type: ignore[override]
        self,
        request: health_pb2.HealthCheckRequest,
        context: Context,
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Every change, until the client goes or the server has drained."""
        last = None
        while not self._stopped.is_set():
            status = self.status(request.service)
            if status is not last:
                last = status
                yield status
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), LOOK_SECONDS)

    def stop(self) -> None:
        """Ends every Watch."""
        self._stopped.set()
