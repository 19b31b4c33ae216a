"""The order of a GPU day: sections within their time, results on disk after each of them."""

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.gpu.plan import Clock, Outcome, Section
from tests.bench.gpu.pool import Pool, Run, run_here

SECONDS = 450.0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_day")
    parser.add_argument(
        "--out", type=Path, help="results, JSON; gpu_day.json, and none where nothing is measured"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of the whole run; what is left out is named"
    )
    parser.add_argument("--only", nargs="*", help="sections to run, by the start of their names")
    parser.add_argument(
        "--dry-run", action="store_true", help="small, on the CPU: runs all code, measures nothing"
    )
    parser.add_argument("--read", type=Path, help="print the table of such a file and run nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """0: everything ran and held. 1: something failed. 2: nothing could run here."""
    options = parse(arguments)
    if options.read:
        return _read(options.read)
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read at the first import of a kernel
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("no CUDA device: nothing to measure (--dry-run runs all code on the CPU)")
        return 2
    return _day(options)


def _read(path: Path) -> int:
    from tests.bench.gpu.report import table

    try:
        results = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        print(f"{path}: {error}")
        return 2
    print(table(results))
    return 0


def _day(options: argparse.Namespace) -> int:
    if options.dry_run:
        from tests.bench.gpu.small import shrink

        shrink()
    from tests.bench.gpu.correctness import without_odd_sizes
    from tests.bench.gpu.report import table
    from tests.bench.gpu.sections import dry, sections

    clock = Clock(options.seconds)
    run = dry() if options.dry_run else None
    planned = sections(small=options.dry_run)
    chosen = [s for s in planned if not options.only or s.name.startswith(tuple(options.only))]
    if not chosen:
        print(f"no section is called {options.only}: {', '.join(s.name for s in planned)}")
        return 2
    out = options.out or (None if options.dry_run else Path("gpu_day.json"))
    results: dict[str, Any] = {
        "dry_run": options.dry_run,
        "started_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds_allowed": options.seconds,
        "without_odd_sizes": without_odd_sizes(),
        "sections": {},
    }
    pool = Pool(prepare)
    try:
        for section in chosen:
            outcome = run_here(section, clock, run) if run else pool.run(section, clock)
            results["sections"][section.name] = asdict(outcome)
            results["seconds"] = round(clock.elapsed(), 1)
            if out is not None:
                _write(out, results)
            _say(section, outcome, clock)
    finally:
        pool.close()
    print(table(results))
    found = results["sections"].values()
    return int(any(outcome["failed"] or outcome["skipped"] for outcome in found))


def prepare() -> Run:
    """In each process of the pool: imports, and the device."""
    from tests.bench.gpu.sections import on_gpu

    day: Callable[[str, str], Any] = on_gpu()
    return day


def _write(path: Path, results: dict[str, Any]) -> None:
    """Whole or not at all: a run that is cut off leaves the sections before."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(results, indent=1, allow_nan=True) + "\n")
    part.replace(path)


def _say(section: Section, outcome: Outcome, clock: Clock) -> None:
    counts = f"{len(outcome.results)} done, {len(outcome.failed)} failed"
    skipped = f", {len(outcome.skipped)} skipped" if outcome.skipped else ""
    print(f"[{clock.elapsed():5.0f} s] {section.name}: {counts}{skipped}", flush=True)
