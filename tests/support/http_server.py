"""The product's HTTP server around an ASGI app, in a thread of the test's process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from expertmesh.deploy import listener


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def http_server(app: Any) -> Iterator[str]:
    """Yields the base URL. The server and its event loop are gone afterwards."""
    bound = listener.bind("127.0.0.1", 0)
    server = listener.http_server(app, grace_seconds=1, lifespan=False)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the test server did not start"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        bound.close()
        assert not thread.is_alive()
