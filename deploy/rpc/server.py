"""The engine protocol's port.

    import grpc
    from expertmesh.deploy.rpc.v1 import engine_pb2, engine_pb2_grpc

    with grpc.insecure_channel("127.0.0.1:50051") as channel:
        engine = engine_pb2_grpc.EngineStub(channel)
        request = engine_pb2.GenerateRequest(
            text="Once upon a time",
            sampling_params=engine_pb2.SamplingParams(max_tokens=40, temperature=0),
        )
        for message in engine.Generate(request, timeout=60):
            print(message.chunk.text, end="", flush=True)

Other languages: the .proto is in the wheel (`expertmesh/deploy/rpc/proto`), and grpcurl needs only
the port: `grpcurl -plaintext -d '{"text": "Hello"}' HOST:50051 expertmesh.v1.Engine/Generate`.
"""

import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from expertmesh.deploy.edge_settings import GrpcSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.rpc.gate import Gate
from expertmesh.deploy.rpc.health import HealthService
from expertmesh.deploy.rpc.service import SERVICE, EngineService
from expertmesh.deploy.rpc.tls import credentials

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
# What calls that were told to end get to send their last status.
LAST_WORDS_SECONDS = 1.0
# How long a client may take to answer a ping.
PING_TIMEOUT_SECONDS = 20.0


def channel_options(settings: GrpcSettings) -> list[tuple[str, Any]]:
    """grpcio ignores names that it does not know: each has a test that sees its effect."""
    patience = min(PING_TIMEOUT_SECONDS, settings.keepalive_s)
    return [
        ("grpc.max_receive_message_length", settings.message_bytes),
        ("grpc.max_concurrent_streams", settings.max_streams),
        # Beside those, streams that have ended and whose memory is about to be freed. Without it
        # a client that keeps to the limit is refused when it opens a stream right after an end.
        ("grpc.http2.max_deallocating_streams", settings.max_streams),
        # A third ping sooner than this closes the connection. Half of what clients are promised:
        # the network may bring two pings closer together than they were sent.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(settings.min_ping_interval_s / 2)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Our own pings: a client that vanished without a word is noticed, and its calls end.
        ("grpc.keepalive_time_ms", _ms(settings.keepalive_s)),
        # Not keepalive_timeout_ms, which holds for keep-alive pings alone: while one that measures
        # bandwidth is unanswered, those are not sent, and its own limit is a minute.
        ("grpc.http2.ping_timeout_ms", _ms(patience)),
        # As HTTP's listener: beside the hold of the command, and of a door that is being replaced.
        ("grpc.so_reuseport", 1),
    ]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


class GrpcServer:
    """Serves one front on its settings' port, on the event loop that starts it."""

    def __init__(self, front: Front, settings: GrpcSettings, host: str) -> None:
        self._front, self._settings, self._host = front, settings, host
        self._server: grpc.aio.Server | None = None
        self._engine: EngineService | None = None
        self._health: HealthService | None = None

    async def start(self) -> None:
        """Returns when the port is open. Raises OSError when it is taken, or TLS can not work."""
        settings = self._settings
        self._engine, self._health = EngineService(self._front), HealthService(self._front)
        self._server = server = grpc.aio.server(
            interceptors=[Gate(self._front)], options=channel_options(settings)
        )
        server.add_generic_rpc_handlers((self._engine.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if settings.reflection:
            names: Sequence[str] = (SERVICE, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        self._bind(server)
        await server.start()

    def _bind(self, server: grpc.aio.Server) -> None:
        host, settings = self._host, self._settings
        address = f"{f'[{host}]' if ':' in host else host}:{settings.port}"
        try:
            if settings.tls is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials(settings.tls))
        except RuntimeError as error:
            raise OSError(f"the gRPC port {address} can not be opened: {error}") from None
        if not bound:
            raise OSError(f"the gRPC port {address} can not be opened")

    async def stop(self, grace_s: float) -> None:
        """Returns when every call has ended. New ones are refused at once with UNAVAILABLE, and
        health is NOT_SERVING, while running ones have `grace_s` to end; then they fail."""
        if self._server is None or self._engine is None or self._health is None:
            return
        self._front.drain()
        over = time.monotonic() + grace_s
        await self._engine.calls.drain(grace_s)
        self._health.stop()
        await self._server.stop(max(LAST_WORDS_SECONDS, over - time.monotonic()))
