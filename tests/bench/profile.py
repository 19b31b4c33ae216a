"""Where a decode step's time goes, by part, for models x modes x concurrencies.

Milliseconds per step, exclusive: a part's own time without the parts inside it. With experts in
processes of their own, `exchange: wait` is what the attention half waits for them.
"""

import argparse
import time
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from expertmesh.actors.attention.engine import Engine
from tests.bench import engines, load, machine, models
from tests.bench.timers import Parts, timed_parts


def main(arguments: list[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="profile", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["nano", "wide"])
    parser.add_argument("--modes", nargs="+", default=["one_process", "two_tier"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of the attention half")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    results = []
    for model in options.models:
        for mode in options.modes:
            results += _profile(model, mode, options.concurrency, options.steps)
    _print(results)
    return {"bench": "profile", "machine": machine.facts(), "threads": options.threads,
            "prompt_tokens": load.PROMPT_TOKENS, "results": results}  # fmt: skip


def _profile(model: str, mode: str, concurrencies: list[int], steps: int) -> list[dict[str, Any]]:
    folder = models.checkpoint(model)
    with timed_parts() as parts, ExitStack() as stack:
        if mode == "one_process":
            engine = engines.local_engine(folder)
        else:
            engine = stack.enter_context(engines.mesh_engine(folder))
        parts.watch_head(engine.model)  # type: ignore[arg-type]
        return [_measure(engine, parts, model, mode, n, steps) for n in concurrencies]


def _measure(
    engine: Engine, parts: Parts, model: str, mode: str, concurrency: int, steps: int
) -> dict[str, Any]:
    """`steps` decode steps of `concurrency` requests, after prompts and a warm-up."""
    warm_up = max(5, steps // 10)
    spare = 64  # the prompts of many requests take several steps, in which others decode already
    batch = load.prompts(concurrency, engine.model.config.vocab_size)
    for n, prompt in enumerate(batch):
        engine.submit(load.greedy(f"{mode}-{concurrency}-{n}", prompt, warm_up + steps + spare))
    prompts_done = engine.stats().prompt_tokens + sum(map(len, batch))
    while engine.stats().prompt_tokens < prompts_done:
        _step(engine)
    for _ in range(warm_up):
        _step(engine)
    parts.clear()
    start, start_cpu = time.perf_counter(), time.thread_time()
    for _ in range(steps):
        engine.step()
    wall, cpu = time.perf_counter() - start, time.thread_time() - start_cpu
    result = {
        "model": model,
        "mode": mode,
        "concurrency": concurrency,
        "step_ms": wall / steps * 1e3,
        "step_cpu_ms": cpu / steps * 1e3,
        "tokens_per_s": concurrency * steps / wall,
        "parts_ms": {part: s / steps * 1e3 for part, s in sorted(parts.wall.items())},
        "parts_cpu_ms": {part: s / steps * 1e3 for part, s in sorted(parts.cpu.items())},
        "calls": {part: calls / steps for part, calls in sorted(parts.calls.items())},
    }
    while engine.has_work:
        _step(engine)
    return result


def _step(engine: Engine) -> None:
    engine.step()
    if engine.failed is not None:
        raise RuntimeError(engine.failed)


def _print(results: list[dict[str, Any]]) -> None:
    """One column per result: wall ms, CPU ms in brackets, share of the step's wall time."""
    table = Table(title="one decode step: wall ms (CPU ms of the attention half's thread) share")
    table.add_column("part")
    for result in results:
        mode = "1 process" if result["mode"] == "one_process" else "2 tiers"
        table.add_column(f"{result['model']}\n{mode}, {result['concurrency']}", justify="right")
    for part in sorted({part for result in results for part in result["parts_ms"]}):
        cells = []
        for result in results:
            wall, cpu = (result[key].get(part) for key in ("parts_ms", "parts_cpu_ms"))
            share = 0 if wall is None else wall / result["step_ms"]
            cells.append("" if wall is None else f"{wall:.2f} ({cpu:.2f}) {share:4.0%}")
        table.add_row(part, *cells)
    table.add_section()
    table.add_row("step", *[f"{r['step_ms']:.2f} ({r['step_cpu_ms']:.2f})     " for r in results])
    table.add_row("tokens/s", *[f"{result['tokens_per_s']:.0f}     " for result in results])
    Console(stderr=True, width=60 + 24 * len(results)).print(table)
