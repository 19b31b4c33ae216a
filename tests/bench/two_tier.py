"""Two tiers against one process: decode tokens/s with experts in their own actors and without.

All shapes of a model are alive at the same time and take turns. Cores are equal: every shape may
use all of them. One process is measured with one thread and with a thread per core, as either may
be the faster one; the headline ratio is against the better of the two at that concurrency.
"""

import argparse
from contextlib import ExitStack
from typing import Any

from expertmesh.actors.model.config import load_config
from tests.bench import machine, models
from tests.bench.systems import Command, Worker, alternate, best, expertmesh, ratios

TARGET = "two_tier / best_one_process >= 0.8 at concurrency 32"


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="two_tier", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["nano", "wide"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--new", type=int, default=64, help="ids generated per request")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, machine.cores()}),
                        help="of the one process; each is measured")  # fmt: skip
    parser.add_argument("--expert-actors", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=["two_tier"], help="see launch.py")
    options = parser.parse_args(arguments)
    facts = machine.facts()
    measured = {name: _model(name, options) for name in options.models}
    return {"bench": "two_tier", "machine": facts, "target": TARGET, "models": measured,
            "options": vars(options)}  # fmt: skip


def _model(name: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = models.checkpoint(name)
    commands: dict[str, Command] = {}
    for threads in options.threads:
        commands[f"one_process_{threads}_threads"] = expertmesh(folder, "one_process", threads)
    for shape in options.shapes:
        # More processes than cores already: one thread each.
        commands[shape] = expertmesh(folder, shape, 1, options.expert_actors)
    with ExitStack() as stack:
        workers = {key: stack.enter_context(Worker(c)) for key, c in commands.items()}
        results = alternate(
            workers, vocab=load_config(folder).vocab_size, concurrencies=options.concurrency,
            repetitions=options.repetitions, new=options.new,
        )  # fmt: skip
        systems = {key: worker.facts for key, worker in workers.items()}
    for row in results.values():
        row["best_one_process"] = best(row, "one_process")
    ones = [key for key in commands if key not in options.shapes]
    return {
        "systems": systems,
        "results": results,
        "ratios": {
            f"{shape} / {base}": ratios(results, shape, base)
            for shape in options.shapes
            for base in [*ones, "best_one_process"]
        },
    }
