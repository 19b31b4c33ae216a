"""`expertmesh serve` as a system under test, asked over HTTP by streaming completions.

`{"checkpoint": ..., "expert_actors": n}`; the server is a process of its own, the client is here.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from tests.bench import engines
from tests.bench.http_client import stream_ids
from tests.bench.load import closed_batch
from tests.bench.workers.protocol import serve

HOST = "127.0.0.1"


class HttpServer:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "expertmesh", "serve", options["checkpoint"],
                "--expert-actors", str(options["expert_actors"]), "--port", str(self.port),
                "--served-model-name", "bench", "--dtype", "float32",
                "--expert-cache-gb", str(engines.CACHE_BYTES / 2**30),
                "--max-running", str(engines.SLOTS),
            ],
            stdout=sys.stderr,
        )  # fmt: skip
        self._wait_ready(time.monotonic() + 170)

    def _wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/ready", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.close()
        raise RuntimeError(f"the server did not get ready (exit {self.process.poll()})")

    def facts(self) -> dict[str, Any]:
        return {
            "system": "expertmesh serve, over HTTP",
            "expert_actors": self.options["expert_actors"],
            "threads_per_process": int(os.environ["OMP_NUM_THREADS"]),
        }

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        async def load() -> dict[str, Any]:
            streams = [stream_ids(HOST, self.port, "bench", prompt, new) for prompt in prompts]
            return await closed_batch(streams)

        return asyncio.run(load())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


if __name__ == "__main__":
    serve(HttpServer)
