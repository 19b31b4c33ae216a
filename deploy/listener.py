"""The HTTP server around an app: bound before it serves, and stopped within a bound."""

import socket

import uvicorn
from starlette.types import ASGIApp

# Above the idle time of common client pools and proxies (60 to 75 s): whoever closes first must
# be the client, or its next request meets a closing socket.
KEEP_ALIVE_SECONDS = 90


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A listening address. Raises OSError when it is taken.

    shared: other processes of this server may bind it too; the kernel spreads connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def http_server(app: ASGIApp, grace_seconds: int, lifespan: bool = True) -> uvicorn.Server:
    """uvicorn as this product runs it: no access log on the hot path, long keep-alive.

    grace_seconds: how long running answers may go on after a stop.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on" if lifespan else "off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace_seconds,
        backlog=2048,
        server_header=False,
    )
    return uvicorn.Server(config)
