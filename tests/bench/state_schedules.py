"""Wrong state in random schedules: `python -m tests.bench state_schedules`.

Small real model (KDA and MLA, float32), two engines with the prefix cache over one store, worlds in
several processes. Every logits row that a token is drawn from is compared with the model alone, bit
by bit (kv-state 5, G1). A failing schedule is named by its world and number.
"""

import sys
import tempfile
import traceback
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from tests.support.state_below import Below, Memory, Tiers
from tests.support.state_model import small_model
from tests.support.state_oracle import Oracle
from tests.support.state_schedules import Counts, World

_oracles: dict[int, Oracle] = {}  # of this process
MOST_TEXTS = 60_000  # remembered: about 100 bytes each


def run_world(seed: int, schedules: int, layers: int) -> tuple[Counts, list[str]]:
    """Schedules of one world, up to the first that fails. Every fourth has real tiers below."""
    torch.set_num_threads(1)
    oracle = _oracles.setdefault(layers, Oracle(small_model(layers)))
    if len(oracle.rows) > MOST_TEXTS:
        oracle.rows.clear()
    with tempfile.TemporaryDirectory() as folder:
        kind: type[Memory | Tiers] = Tiers if seed % 4 == 0 else Memory
        below: Below = kind(seed, Path(folder))
        world, number = World(seed, small_model(layers), oracle, below), 0
        try:
            for number in range(schedules):
                world.schedule(number)
        except Exception:
            world.counts.mismatches += 1
            return world.counts, [f"world {seed}, {number}:\n{traceback.format_exc(limit=-4)}"]
        finally:
            world.close()
    return world.counts, []


def main(arguments: list[str]) -> dict[str, Any]:
    parser = ArgumentParser(prog="python -m tests.bench state_schedules")
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--each", type=int, default=50, help="schedules of one world")
    parser.add_argument("--seed", type=int, default=0, help="of the first world")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    worlds = -(-options.schedules // options.each)
    total, failures, start = Counts(), list[str](), perf_counter()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        running = [
            pool.submit(run_world, options.seed + world, options.each, options.layers)
            for world in range(worlds)
        ]
        for done in running:
            counts, failed = done.result()
            total = Counts(**{k: v + getattr(total, k) for k, v in asdict(counts).items()})
            failures += failed
            for failure in failed:
                print(failure, file=sys.stderr, flush=True)
            if total.schedules % 1000 < options.each:
                shown = f"{total.schedules} schedules, {total.mismatches} mismatches"
                print(f"{perf_counter() - start:.0f} s: {shown}", file=sys.stderr, flush=True)
    return {
        **asdict(total),
        # With none seen in n, the rate is below 3 / n with 95 % confidence.
        "upper_bound_95": None if failures else 3 / max(1, total.schedules),
        "worlds": worlds,
        "layers": options.layers,
        "seconds": round(perf_counter() - start, 1),
        "failures": failures[:20],
    }
