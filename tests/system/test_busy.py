"""Several servers that start at once on one machine, and work that is heavy without being ill:
nobody is taken for dead because it is busy."""

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.support.door import Door
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process, wait_for

START = 240.0
# An answer that stays out for longer is one that a liveness probe counts as missed.
HEALTH_S = 10.0
GREEDY = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
MEGABYTES = 20


class Pulse:
    """Asks for health all the time, as a liveness probe does."""

    def __init__(self, url: str) -> None:
        self.missed: list[str] = []
        self.asked = 0
        self._url, self._stop = url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        with httpx.Client(timeout=HEALTH_S) as client:
            while not self._stop.wait(0.1):
                self.asked += 1
                try:
                    answer = client.get(f"{self._url}/health")
                    if answer.status_code != 200:
                        self.missed.append(answer.text)
                except httpx.HTTPError as error:
                    self.missed.append(repr(error))

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def burners(count: int) -> Iterator[None]:
    """Processes that want whole cores."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[tuple[ServerProcess, str]]]:
    """Started at the same moment: two clusters with a mesh each, and two of one process."""
    with contextlib.ExitStack() as stack:
        started = []
        for actors in ("1", "1", "0", "0"):
            port = free_port()
            flags = ("--port", str(port), "--expert-actors", actors)
            server = stack.enter_context(server_process(*flags))
            started.append((server, f"http://127.0.0.1:{port}"))
        yield started


@pytest.mark.timeout(400)
def test_all_of_several_starts_at_once_serve(servers: list[tuple[ServerProcess, str]]) -> None:
    texts = set()
    for server, url in servers:
        server.wait_ready(url, START)
        with Door(url, model="nano") as door:
            texts.add(door.text("Once upon a time", **GREEDY))
    assert len(texts) == 1
    for server, _ in servers[1:]:
        server.process.terminate()
    assert [server.wait(120) for server, _ in servers[1:]] == [0] * 3


@pytest.mark.timeout(400)
def test_busy_is_not_dead(servers: list[tuple[ServerProcess, str]]) -> None:
    server, url = servers[0]
    server.wait_ready(url, START)
    with Door(url, model="nano") as door, Door(url, model="nano") as other, Pulse(url) as pulse:
        door.http.timeout = other.http.timeout = 180
        expected = door.text("Once upon a time", **GREEDY)
        done = threading.Event()

        def heavy() -> None:
            text = ("The quick brown fox jumps over a lazy dog. " * (MEGABYTES * 25_000))[
                : MEGABYTES << 20
            ]
            assert other.ok("/tokenize", prompt=text)["count"] > MEGABYTES << 17
            error = other.refused("/v1/completions", prompt=text, max_tokens=1)
            assert error["code"] == "context_length_exceeded"
            grammar = "(" + "|".join(f"[a-z]{{1,40}}x{i}" for i in range(3000)) + ")+"
            body = {"structured_outputs": {"regex": grammar}, "max_tokens": 2}
            assert other.post("/v1/completions", prompt="a", **body).status_code in (200, 400)
            done.set()

        thread = threading.Thread(target=heavy)
        with burners(4):
            thread.start()
            while thread.is_alive():
                assert door.text("Once upon a time", **GREEDY) == expected
        thread.join()
        assert done.is_set()
        wait_for(lambda: pulse.asked > 10, 60)
        status = door.http.get("/mesh").json()
    assert pulse.missed == []
    assert (status["losses"], status["failovers"], status["state"]) == (0, 0, "ready")
