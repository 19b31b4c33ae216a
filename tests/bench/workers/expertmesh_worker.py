"""ExpertMesh as a system under test: `{"checkpoint": ..., "shape": ..., "expert_actors": n}`.

Shapes are those of launch.py. Ray, where a shape needs it, runs for this worker alone.
"""

import asyncio
import os
import threading
from collections.abc import Coroutine
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.bench import launch
from tests.bench.load import ClientLoad
from tests.bench.workers.protocol import serve

PROCESSES = {
    "one_process": "1",
    "bare_mesh": "1 attention + {n} experts, no Ray",
    "two_tier": "1 attention + {n} experts + client",
    "two_tier_ping_pong": "1 attention + {n} experts + client; two micro-batches in flight",
}


class ExpertMesh:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.threads = int(os.environ["OMP_NUM_THREADS"])
        torch.set_num_threads(self.threads)
        # The event loop never stops: between questions the client must go on with its health calls.
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        folder, experts = Path(options["checkpoint"]), options["expert_actors"]
        client, self.close = self._await(
            launch.start(options["shape"], folder, experts, self.threads)
        )
        self._load = ClientLoad(client)

    def facts(self) -> dict[str, Any]:
        processes = PROCESSES[self.options["shape"]].format(n=self.options["expert_actors"])
        return {
            "system": "expertmesh",
            "versions": {"expertmesh": version("expertmesh"), "torch": torch.__version__},
            "weights": "float32, experts mxfp4 decoded to float32",
            "processes": processes,
            "threads_per_process": self.threads,
        }

    def score(self, ids: list[int]) -> dict[str, list[Any]]:
        return self._await(self._load.score(ids))

    def generate(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        return self._await(self._load.generate(prompts, new))

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


if __name__ == "__main__":
    serve(ExpertMesh)
