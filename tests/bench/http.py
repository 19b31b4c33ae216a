"""HTTP streaming against the engine behind it: tokens/s of the same load by either way in.

`two_tier`: `expertmesh serve` with experts in actors, against the same mesh asked through its own
client without HTTP. `one_process`: the same with --expert-actors 0. A small raw client keeps the
load generator's share of the cores low; it runs on them all the same.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from expertmesh.actors.model.config import load_config
from tests.bench import machine, models
from tests.bench.systems import Command, Worker, alternate, expertmesh, ratios

TARGET = "http / engine >= 0.85 at concurrency 32"


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="http", description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--shapes", nargs="+", default=["two_tier", "one_process"])
    parser.add_argument("--expert-actors", type=int, default=2)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[32])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="ids generated per request")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    shapes = {shape: _shape(shape, options) for shape in options.shapes}
    return {"bench": "http", "machine": facts, "target": TARGET, "options": vars(options),
            "shapes": shapes}  # fmt: skip


def _shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = models.checkpoint(options.model)
    experts = options.expert_actors if shape == "two_tier" else 0
    # As `expertmesh serve` counts: one process leaves a core to HTTP, actors take one thread each.
    threads = max(1, machine.cores() - 1) if shape == "one_process" else 1
    commands = {
        "engine": expertmesh(folder, shape, threads, experts),
        "http": _server(folder, experts, threads),
    }
    with ExitStack() as stack:
        workers = {key: stack.enter_context(Worker(c)) for key, c in commands.items()}
        results = alternate(
            workers, vocab=load_config(folder).vocab_size, concurrencies=options.concurrency,
            repetitions=options.repetitions, new=options.new,
        )  # fmt: skip
        systems = {key: worker.facts for key, worker in workers.items()}
    keys = ("decode_tokens_per_s", "total_tokens_per_s")
    return {
        "systems": systems,
        "results": results,
        "ratios": {key: ratios(results, "http", "engine", key) for key in keys},
    }


def _server(folder: Path, experts: int, threads: int) -> Command:
    return Command(
        (sys.executable, "-m", "tests.bench.workers.http_worker"), threads,
        {"checkpoint": str(folder), "expert_actors": experts},
    )  # fmt: skip
