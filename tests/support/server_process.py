"""`expertmesh serve` as a real process, and the proof that nothing of it is left."""

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

MARK = "EXPERTMESH_TEST_MARK"


class ServerProcess:
    """Started by `server_process`. Every descendant carries the mark in its environment."""

    def __init__(self, arguments: list[str]) -> None:
        self.mark = uuid.uuid4().hex
        self._log = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        environment.pop("RAY_ADDRESS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "expertmesh", "serve", *arguments],
            env=environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    @property
    def output(self) -> str:
        return Path(self._log.name).read_text()

    def wait(self, seconds: float) -> int:
        """The exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.output}") from None

    def wait_ready(self, url: str, seconds: float) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"exited {self.process.returncode}:\n{self.output}"
            try:
                return httpx.get(f"{url}/ready", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(ready, seconds, lambda: self.output)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def descendants(self) -> dict[int, str]:
        """pid -> command line of every live process with this server's mark."""
        return marked_processes(self.mark)

    def kill_everything(self) -> None:
        for pid in self.descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(10)
        self._log.close()


def marked_processes(mark: str) -> dict[int, str]:
    """pid -> command line of every live process that has `mark` in its environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() not in (folder / "environ").read_bytes():
                continue
            if (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                continue
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        found[int(folder.name)] = line.strip()
    return found


@contextmanager
def server_process(*arguments: str | Path) -> Iterator[ServerProcess]:
    """The process; whatever a failing test leaves of it is killed."""
    server = ServerProcess([str(argument) for argument in arguments])
    try:
        yield server
    finally:
        server.kill_everything()


def wait_for(
    condition: Callable[[], bool], seconds: float, explain: Callable[[], str] = lambda: ""
) -> float:
    """Seconds it took until `condition` held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, f"not within {seconds} s\n{explain()}"
        time.sleep(0.05)
    return time.monotonic() - start
