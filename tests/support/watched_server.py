"""`expertmesh serve --expert-actors 0` as a process whose memory, files and gauges can be read."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.door import Door
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process, wait_for

START = 240.0
# Gauges of an idle server are all 0: requests, and pages and slots in use.
IDLE = (
    "expertmesh_num_requests_running",
    "expertmesh_num_requests_waiting",
    "expertmesh_kv_cache_usage_perc",
    "expertmesh_state_slot_usage_perc",
    "expertmesh_http_requests_in_flight",
)
MEGABYTE = 1 << 20


class WatchedServer:
    """A running server. Everything is read from outside of it."""

    def __init__(self, url: str, process: ServerProcess) -> None:
        self.url, self.process = url, process
        self._proc = Path(f"/proc/{process.process.pid}")

    def rss(self) -> int:
        """Bytes of memory that are its own."""
        lines = (self._proc / "status").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    def descriptors(self) -> int:
        """Open files and sockets."""
        return sum(1 for _ in (self._proc / "fd").iterdir())

    def gauges(self) -> dict[str, float]:
        """IDLE gauges by name. Each has at least one sample, or it would read as 0."""
        with Door(self.url) as door:
            lines = door.http.get("/metrics").text.splitlines()
        found: dict[str, float] = {}
        for line in lines:
            name = line.partition("{")[0]
            if name in IDLE:
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
        assert set(found) == set(IDLE), found
        return found

    def wait_idle(self, seconds: float = 30.0) -> None:
        """Until every gauge is 0."""
        wait_for(lambda: not any(self.gauges().values()), seconds, lambda: str(self.gauges()))


@contextmanager
def watched_server(model: Path, *arguments: str) -> Iterator[WatchedServer]:
    """Serves `model`, is ready when it is yielded, and gone afterwards."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    fixed = ("--expert-actors", "0", "--port", str(port))
    with server_process(model, *fixed, *arguments) as process:
        process.wait_ready(url, START)
        yield WatchedServer(url, process)
