"""Systems under test as processes that are all alive at once, and the alternation between them.

Ratios are taken between medians of runs that alternate system by system, so that whatever else the
machine does in those minutes hits all of them alike.
"""

import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from tests.bench import load
from tests.bench.models import ROOT

WORKERS = ROOT / "tests" / "bench" / "workers"


class WorkerFailed(RuntimeError):
    """A system under test died, hung or reported an error; the text is its own."""


@dataclass(frozen=True)
class Command:
    """How to start a system: argv without the options, its threads, its options."""

    argv: tuple[str, ...]
    threads: int
    options: Mapping[str, Any]


def expertmesh(checkpoint: Path, shape: str, threads: int, expert_actors: int = 2) -> Command:
    """shape: as in launch.SHAPES. threads: of the one process, or of each actor."""
    return Command(
        (sys.executable, "-m", "tests.bench.workers.expertmesh_worker"),
        threads,
        {"checkpoint": str(checkpoint), "shape": shape, "expert_actors": expert_actors},
    )


class Worker:
    """A running system. One question at a time."""

    def __init__(
        self,
        command: Command,
        *,
        root: Path = ROOT,
        start_s: float = 180.0,
        answer_s: float = 600.0,
    ) -> None:
        """root: of the checkout that it runs."""
        # Explicit for every process: what the caller's shell says must not decide a comparison.
        threads = str(command.threads)
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        if root != ROOT:  # whose package comes before the installed one
            environment["PYTHONPATH"] = str(root / ".src")
        self._answer_s = answer_s
        self._process = subprocess.Popen(
            [*command.argv, json.dumps(command.options)], cwd=root, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            self._read(start_s)
            self.facts = self.ask("facts")
        except BaseException:
            self.close()
            raise

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerFailed(f"the worker is gone (exit {self._process.poll()})") from error
        return self._read(self._answer_s)

    def _read(self, seconds: float) -> dict[str, Any]:
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], seconds)[0]:
            raise WorkerFailed(f"no answer within {seconds:.0f} s")
        line = out.readline()
        if not line:
            raise WorkerFailed(f"the worker ended (exit {self._process.wait(10)})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer

    def cpu_seconds(self) -> float:
        """Of the process and all below it, so far."""
        process = psutil.Process(self._process.pid)
        times = [p.cpu_times() for p in (process, *process.children(recursive=True))]
        return sum(t.user + t.system for t in times)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def alternate(
    systems: Mapping[str, Worker],
    *,
    vocab: int,
    concurrencies: Sequence[int],
    repetitions: int,
    new: int,
) -> dict[str, Any]:
    """Per concurrency and system: median rates over the repetitions, and every sample.

    One unmeasured run each warms caches. `same_ids`: share of generated ids equal to the first
    system's, which shows that the systems computed the same thing.
    """
    results: dict[str, Any] = {}
    for concurrency in concurrencies:
        batch = load.prompts(concurrency, vocab)
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
        for repetition in range(repetitions + 1):
            # Every second round backwards: no system always follows the same one.
            order = list(systems.items())[:: -1 if repetition % 2 else 1]
            for name, worker in order:
                timing = worker.ask("generate", prompts=batch, new=new)
                if repetition:
                    samples[name].append(timing)
        reference = next(iter(samples.values()))[0]["ids"]
        results[str(concurrency)] = {
            name: _summary(runs, reference) for name, runs in samples.items()
        }
    return results


def _summary(runs: list[dict[str, Any]], reference: list[list[int]]) -> dict[str, Any]:
    def median(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    ours = [token for sequence in runs[0]["ids"] for token in sequence]
    theirs = [token for sequence in reference for token in sequence]
    return {
        "decode_tokens_per_s": median("decode_tokens_per_s"),
        "total_tokens_per_s": median("total_tokens_per_s"),
        "prefill_s": median("prefill_s"),
        "decode_samples": [round(run["decode_tokens_per_s"], 1) for run in runs],
        "same_ids": sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(theirs),
    }


def ratios(
    results: Mapping[str, Any], of: str, to: str, key: str = "decode_tokens_per_s"
) -> dict[str, float]:
    """concurrency -> rate of system `of` over that of system `to`."""
    return {n: round(row[of][key] / row[to][key], 3) for n, row in results.items()}


def best(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The fastest of the results of one system with different thread counts."""
    found = [result for key, result in row.items() if key.startswith(prefix)]
    fastest: dict[str, Any] = max(found, key=lambda result: result["decode_tokens_per_s"])
    return fastest
