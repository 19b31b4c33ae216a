"""The HTTP server around an app: bound before it serves, and stopped within a bound."""

import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from expertmesh.deploy.edge_settings import HttpSettings
from expertmesh.deploy.http_protocol import BoundedProtocol

MOST_SOCKETS = 1 << 16


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A listening address. Raises OSError when it is taken.

    shared: other processes of this server may bind it too; the kernel spreads connections.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol by name: asyncio switches Nagle's algorithm off only on sockets that say TCP, and
    # without that a client's delayed ACK puts 40 ms between an answer's head and its body.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def hold(host: str, port: int) -> socket.socket:
    """Takes a free address for as long as the returned socket is open. Raises OSError when it is
    taken, by a listener or by another hold.

    A hold does not listen, so the kernel gives it no connections; `bind(shared=True)` works beside
    it, also in another process of this user, and `bind` without `shared` does not.
    """
    with _one_at_a_time(port):
        bind(host, port).close()
        return _hold(host, port)


def _hold(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            # Without SO_REUSEADDR: two idle sockets that both have it do not exclude each other.
            holder.bind((host, port))
        except OSError:
            # The address is free, but connections of an earlier listener linger that had no
            # SO_REUSEPORT. A weaker hold beats refusing for a minute.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind((host, port))
    except OSError:
        holder.close()
        raise
    return holder


def _one_at_a_time(port: int, limit: float = 5.0) -> socket.socket:
    """A lock between processes, so that no two find the same port free: a name in the abstract
    space of this network namespace, which goes with the process that has it. Raises OSError."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    deadline = time.monotonic() + limit
    while True:
        try:
            lock.bind(f"\0expertmesh-port-{port}")
            return lock
        except OSError:
            if time.monotonic() > deadline:
                lock.close()
                raise
            time.sleep(0.01)


def allow_connections() -> None:
    """As many open sockets as the system lets this process have: the usual 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_SOCKETS if hard == resource.RLIM_INFINITY else min(hard, MOST_SOCKETS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class HttpServer(uvicorn.Server):
    """Leaves signals to the process: on SIGTERM uvicorn would close the port at once, and whoever
    comes during the drain would meet a crash."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: ASGIApp, grace_seconds: int, lifespan: bool = True, http: HttpSettings | None = None
) -> uvicorn.Server:
    """uvicorn as this product runs it: no access log on the hot path, long keep-alive.

    grace_seconds: how long running answers may go on after a stop.
    """
    http = http or HttpSettings()
    tls = http.tls
    ca_file = None if tls is None else tls.client_ca_file
    config = uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_level="warning",
        access_log=False,
        lifespan="on" if lifespan else "off",
        timeout_keep_alive=http.idle_seconds,
        timeout_graceful_shutdown=grace_seconds,
        backlog=2048,
        server_header=False,
        ssl_certfile=None if tls is None else tls.cert_file,
        ssl_keyfile=None if tls is None else tls.key_file,
        ssl_ca_certs=None if ca_file is None else str(ca_file),
        ssl_cert_reqs=ssl.CERT_NONE if ca_file is None else ssl.CERT_REQUIRED,
    )
    return HttpServer(config)
