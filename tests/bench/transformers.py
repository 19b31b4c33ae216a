"""ExpertMesh against Hugging Face transformers' `generate`.

The same kimi_linear checkpoint, the golden `kimi_linear-tiny` with every width times four, and the
same prompts: float32, greedy, batch 8, each in one process. Both are measured with one thread and
with a thread per core; the ratio is between the better of each.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from expertmesh.actors.model.config import load_config
from tests.bench import load, machine, models
from tests.bench.environments import TRANSFORMERS, python_of
from tests.bench.peers import SCORED_TOKENS, agreement
from tests.bench.systems import WORKERS, Command, Worker, alternate, best, expertmesh, ratios

TARGET = "expertmesh / transformers >= 5 at batch 8"


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="transformers", description=__doc__)
    parser.add_argument("--model", default="linear")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--new", type=int, default=48, help="ids generated per request")
    options = parser.parse_args(arguments)
    folder = models.checkpoint(options.model)
    vocab = load_config(folder).vocab_size
    facts = machine.facts()
    with ExitStack() as stack:
        workers = {key: stack.enter_context(Worker(c)) for key, c in _commands(folder).items()}
        text = load.prompts(1, vocab, SCORED_TOKENS, seed=1)[0]
        scores = {key: worker.ask("score", ids=text) for key, worker in workers.items()}
        results = alternate(
            workers, vocab=vocab, concurrencies=[options.batch],
            repetitions=options.repetitions, new=options.new,
        )  # fmt: skip
        systems = {key: worker.facts for key, worker in workers.items()}
    reference = next(iter(scores.values()))
    for row in results.values():
        row["best_expertmesh"] = best(row, "expertmesh")
        row["best_transformers"] = best(row, "transformers")
    keys = ("decode_tokens_per_s", "total_tokens_per_s")
    return {
        "bench": "transformers", "machine": facts, "target": TARGET, "model": str(folder),
        "options": vars(options), "systems": systems, "results": results,
        "agreement": {key: agreement(score, reference) for key, score in scores.items()},
        "ratios": {key: ratios(results, "best_expertmesh", "best_transformers", key)
                   for key in keys},
    }  # fmt: skip


def _commands(folder: Path) -> dict[str, Command]:
    argv = (python_of(TRANSFORMERS), str(WORKERS / "transformers_worker.py"))
    commands = {}
    for threads in sorted({1, machine.cores()}):
        commands[f"expertmesh_{threads}_threads"] = expertmesh(folder, "one_process", threads)
        theirs = Command(argv, threads, {"checkpoint": str(folder)})
        commands[f"transformers_{threads}_threads"] = theirs
    return commands
