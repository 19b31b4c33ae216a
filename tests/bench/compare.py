"""Two versions of ExpertMesh against each other: another checkout before, this one after.

Both are alive at once and take turns round by round, and every ratio is that of two neighbours in
time, so what else the machine does cancels. Rates are after / before; `cpu_seconds`, of all threads
and processes, prompts included, before / after: 2 is twice as good in both. With quartiles.
"""

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from expertmesh.actors.model.config import load_config
from tests.bench import load, machine, models
from tests.bench.systems import Worker, expertmesh

RATES = ("decode_tokens_per_s", "total_tokens_per_s")
CPU = "cpu_seconds"


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="the checkout of before")
    parser.add_argument("--models", nargs="+", default=["nano", "wide"])
    parser.add_argument("--shapes", nargs="+", default=["one_process"], help="see launch.py")
    parser.add_argument("--threads", type=int, default=1, help="of one process or of each actor")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--new", type=int, default=32, help="ids generated per request")
    options = parser.parse_args(arguments)
    if not (options.base / "tests" / "bench").is_dir():
        parser.error(f"--base {options.base} is no checkout of this repository")
    facts = machine.facts()
    results = {
        f"{model}, {shape}": _compare(model, shape, options)
        for model in options.models
        for shape in options.shapes
    }
    options.base = str(options.base)
    return {"bench": "compare", "machine": facts, "options": vars(options),
            "after / before": results}  # fmt: skip


def _compare(model: str, shape: str, options: argparse.Namespace) -> dict[str, Any]:
    folder = models.checkpoint(model)
    vocab = load_config(folder).vocab_size
    command = expertmesh(folder, shape, options.threads)
    with ExitStack() as stack:
        before = stack.enter_context(Worker(command, root=options.base.resolve()))
        after = stack.enter_context(Worker(command))
        return {
            str(n): _rounds(before, after, load.prompts(n, vocab), options)
            for n in options.concurrency
        }


def _rounds(
    before: Worker, after: Worker, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    found: dict[str, list[float]] = {key: [] for key in (*RATES, CPU)}
    same: list[bool] = []
    for repetition in range(options.repetitions + 1):
        # Every second round backwards: neither always follows the other.
        order = [before, after][:: -1 if repetition % 2 else 1]
        timing = {worker: _timed(worker, prompts, options.new) for worker in order}
        if not repetition:  # it warms the caches
            ids = zip(timing[before]["ids"], timing[after]["ids"], strict=True)
            same = [a == b for x, y in ids for a, b in zip(x, y, strict=True)]
            continue
        for key in RATES:
            found[key].append(timing[after][key] / timing[before][key])
        found[CPU].append(timing[before][CPU] / timing[after][CPU])
    row: dict[str, Any] = {key: _quartiles(ratios) for key, ratios in found.items()}
    return row | {"same_ids": sum(same) / len(same)}


def _timed(worker: Worker, prompts: list[list[int]], new: int) -> dict[str, Any]:
    began = worker.cpu_seconds()
    timing = worker.ask("generate", prompts=prompts, new=new)
    return timing | {CPU: worker.cpu_seconds() - began}


def _quartiles(ratios: list[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(ratios) == 1:
        return [round(ratios[0], 3)] * 3
    return [round(q, 3) for q in statistics.quantiles(ratios, n=4, method="inclusive")]
