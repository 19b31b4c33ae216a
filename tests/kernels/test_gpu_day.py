"""The GPU day's script runs to its end where there is no GPU, and says what went wrong where."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.testing

from expertmesh.kernels.registry import OPERATORS
from tests.bench.gpu import stand_ins, timers
from tests.bench.gpu.claims import Claim, floating, none_above
from tests.bench.gpu.main import main
from tests.bench.gpu.plan import Clock, Section
from tests.bench.gpu.pool import Pool
from tests.bench.gpu.report import table
from tests.support.gpu_items import prepare

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Run as a script from a foreign folder, another package `tests` on the path."""
    folder = tmp_path_factory.mktemp("day")
    (folder / "other/tests").mkdir(parents=True)
    (folder / "other/tests/__init__.py").touch()
    command = [sys.executable, str(ROOT / "tests/bench/gpu_day.py"), "--dry-run", "--out", "r.json"]
    env = {**os.environ, "PYTHONPATH": str(folder / "other")}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, json.loads((folder / "r.json").read_text())


def test_every_section_runs_dry(day: tuple[str, dict[str, Any]]) -> None:
    printed, results = day
    for name, found in results["sections"].items():
        assert found["results"] and not found["failed"] and not found["skipped"], name
    assert printed.count("0 failed") == len(results["sections"])
    assert "DRY RUN" in printed and "logits differ" in printed


def test_what_cannot_be_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--read", str(tmp_path / "none.json")]) == 2
    (tmp_path / "torn.json").write_text("{")
    assert main(["--read", str(tmp_path / "torn.json")]) == 2
    assert capsys.readouterr().out.count("\n") == 2
    command = [sys.executable, str(ROOT / "tests/bench/gpu_day.py"), "--dry-run", "--only", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "'none'" in done.stdout and "correctness: K3" in done.stdout


def test_every_triton_operator_is_held_against_float64_and_timed(
    day: tuple[str, dict[str, Any]],
) -> None:
    sections = day[1]["sections"]
    served = {name for name, operator in OPERATORS.items() if not operator.without_triton}
    served.remove("mla_plan")  # torch works it out before a step; Triton's kernel needs none
    timed = {found["operator"] for found in sections["timing"]["results"].values()}
    checked = {name.split("/")[0] for name in sections["correctness: K3"]["results"]}
    assert served <= timed and served <= checked
    assert all(
        found["against"] == "float64"
        for name in ("correctness: K3", "correctness: odd")
        for found in sections[name]["results"].values()
    )
    assert day[1]["without_odd_sizes"] == []


def test_times_are_microseconds_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    replays = SimpleNamespace(replay=lambda: called.append("all"))

    def bench(call: Any, quantiles: list[float], **_: float) -> list[float]:
        for _ in range(3):
            call()
        assert quantiles == [0.2, 0.5, 0.8]
        return [0.001, 0.002, 0.004]

    monkeypatch.setattr(triton.testing, "do_bench", bench)
    monkeypatch.setattr(timers, "captured", lambda calls: (replays, []))
    calls = [lambda: called.append("a"), lambda: called.append("b")]
    timer = timers.EventTimer()
    assert timer.calls_us(calls) == {"median_us": 2.0, "p20_us": 1.0, "p80_us": 4.0}
    assert called == ["a", "b", "a"], "buffers in turn"
    assert timer.graph_us(calls)["median_us"] == 1.0 and called[3:] == ["all"] * 3


def test_the_table_rates_what_was_measured_and_names_what_was_not() -> None:
    kernel = {"operator": "glu", "phase": "decode", "bytes": 2_000_000, "flops": 8, "unit": "fp32"}
    kernel |= {"floor_us": 0.5, "bound": "memory", "call": {"median_us": 9.0}}
    sections = {
        "ceilings": {"copy": {"bytes_per_s": 4e12}},
        "timing": {"glu/decode/x": kernel | {"graph": {"median_us": 1.0}}},
        "baselines": {"glu/decode/x": {"call": {"median_us": 3.0}}},
        "peers": {"theirs": {"ours": "glu/decode", "call": {"median_us": 2.0}}},
        "correctness: odd": {},
    }
    results = {
        "dry_run": False,
        "sections": {
            name: {"results": found, "failed": {}, "skipped": []}
            for name, found in sections.items()
        },
    }
    results["sections"]["correctness: odd"] |= {  # type: ignore[index]
        "failed": {"odd: glu": "Traceback\nValueError: a wrong number"},
        "skipped": ["odd: route", "odd: sample"],
    }
    printed = table(results)
    row = next(line.split() for line in printed.splitlines() if line.startswith("glu/decode/x"))
    assert row[1:] == ["1.0", "9.0", "0.5", "2.00", "50%", "of", "copy", "3.00x", "2.00x", "theirs"]
    assert "FAILED correctness: odd: odd: glu: ValueError: a wrong number" in printed
    assert "skipped for time, correctness: odd: odd: route; odd: sample" in printed


def test_bounds_can_be_broken() -> None:
    exact = torch.randn(50, 40, dtype=torch.float64)
    near = exact.bfloat16()
    assert floating("out", near, exact, l2=1e-6).judge()["holds"]
    wrong = near.clone()
    wrong[3, 5] += 0.1
    assert not floating("one element", wrong, exact, l2=1e-6).judge()["holds"]
    assert not floating("all a little", near * 1.004, exact, l2=1e-6).judge()["holds"]
    wrong[3, 5] = torch.nan
    assert not floating("NaN", wrong, exact, l2=1e-6).judge()["holds"]
    assert not floating("shape", near[:-1], exact, l2=1e-6).judge()["holds"]
    bits = Claim("bits", exact.clone(), exact)
    assert bits.judge()["holds"]
    bits.actual[0, 0] += 1e-12
    assert not bits.judge()["holds"]
    assert none_above("share", torch.tensor([0.0, 0.5]), 0.5).judge()["holds"]
    for bad in (0.6, torch.nan):
        assert not none_above("share", torch.tensor([0.0, bad]), 0.5).judge()["holds"]


def test_a_failure_a_crash_and_a_hang_cost_one_item_each() -> None:
    """Of what a device does to a process nothing reaches the next item."""
    pool = Pool(prepare)
    clock = Clock(60)
    items = ["a", "fails", "b", "faults", "c", "dies", "d", "hangs", "e"]
    try:
        outcome = pool.run(Section("s", items, seconds=50, patience=4), clock)
        late = pool.run(Section("late", ["never"], seconds=0, patience=4), clock)
    finally:
        pool.close()
    assert list(outcome.results) == ["a", "b", "c", "d", "e"]
    a, b, c, d, e = (text.rsplit(" ", 1)[1] for text in outcome.results.values())
    assert a == b and len({b, c, d, e}) == 4
    assert "a wrong number" in outcome.failed["fails"]
    assert "illegal memory access" in outcome.failed["faults"]
    assert outcome.failed["dies"] == "its process ended: 7"
    assert outcome.failed["hangs"] == "ended: no result within its time"
    assert late.skipped == ["never"] and not late.results


def test_stand_ins_take_what_configurations_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_ins, "PACKAGES", ("not_installed", "not_installed.part"))
    assert stand_ins.install() == ["not_installed"] == stand_ins.install()
    try:
        import not_installed

        class Shape(not_installed.BaseModel, frozen=True):
            width: int
            height: int = 3

            @not_installed.model_validator(mode="after")
            def check(self) -> "Shape":
                return self

        assert (Shape(width=2).width, Shape(width=2).height) == (2, 3)
        assert issubclass(not_installed.ValidationError, Exception)
    finally:
        for name in ("not_installed.part", "not_installed"):
            del sys.modules[name]
