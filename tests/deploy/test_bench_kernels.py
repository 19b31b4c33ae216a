import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from expertmesh.deploy.bench import kernels, kernels_report
from expertmesh.deploy.bench.kernels import Measured
from expertmesh.deploy.cli import app
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.kernels import aot
from expertmesh.kernels.cases import all_cases
from expertmesh.kernels.gates import TARGETS, Usage
from expertmesh.kernels.registry import load_kernels
from expertmesh.kernels.work import H200


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "kernels", *arguments])


def test_floors_come_from_the_cases() -> None:
    done = run("--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["gpu"] is None
    assert len(report["cases"]) == len(all_cases())
    for one, case in zip(report["cases"], all_cases(), strict=True):
        assert one["us"] == H200.floor_us(case.work) > 0 and one["measured"] is one["ratio"] is None
        assert one["bound"] in ("memory", "compute") and one["bytes"] == case.work.bytes


def test_a_terminal_gets_a_table_of_the_named_operators() -> None:
    done = run("rms_norm")
    rows = [line for line in done.stdout.splitlines() if "rms_norm" in line]
    assert done.exit_code == 0 and len(rows) == 2
    assert "decode" in rows[0] and "memory" in rows[0] and "there is no GPU" in done.stdout


class Device:
    """A GPU that takes 20 us for everything but the first failing operator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Test GPU")
        monkeypatch.setattr(kernels, "load_kernels", lambda choice, device: object())
        every = {case.operator: "triton" for case in all_cases()}
        monkeypatch.setattr(kernels, "resolve", lambda choice, device: every)
        monkeypatch.setattr(kernels, "measure", self.measure)

    def measure(self, case: Any, served: Any, backend: str) -> Measured:
        if case.operator == "gated_rms_norm":
            return Measured(backend, None, "OutOfMemoryError: [too] large")
        return Measured(backend, 20.0)


def test_a_gpu_is_measured_against_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    (decode, prefill) = json.loads(run("rms_norm", "--json").stdout)["cases"]
    assert decode["measured"] == {"by": "triton", "us": 20.0, "error": ""}
    assert decode["ratio"] == 20.0 / decode["us"] > prefill["ratio"]
    shown = run("rms_norm").stdout
    assert "20.0 us" in shown and "medians on Test GPU" in shown
    failed = run("gated_rms_norm")
    assert failed.exit_code == ExitCode.FAILED and "OutOfMemoryError: [too] large" in failed.stdout


def test_what_a_case_raises_is_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    case: Any = next(case for case in all_cases() if case.operator == "rms_norm")
    found = kernels.measure(case, load_kernels(), "triton")
    assert found.us is None and found.error  # there is no GPU to make operands on

    def lost() -> None:
        raise RuntimeError("an illegal memory access was encountered\nmore about it")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    found = kernels.measure(case, load_kernels(), "triton")
    assert found.error == "RuntimeError: an illegal memory access was encountered"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[aot.Compiled]:
    """Instead of a compiler: one kernel on all targets, spilling on the last."""
    usage, options = Usage(64, 0, 1024, 0, 1, 8, 300, 1.5), {"num_warps": 4, "num_stages": 2}
    whats = [
        aot.Specialisation(target, "m", "mix_kernel", {}, {}, {}, options) for target in TARGETS
    ]
    found = [aot.Compiled(what, ["mix/decode/64"], (64, 1, 1), {}, usage) for what in whats]
    monkeypatch.setattr(kernels_report, "interpreted", lambda: False)
    monkeypatch.setattr(aot, "check", lambda cases, targets, processes: found)
    return found


def test_the_aot_table_and_its_exit_code(compiled: list[aot.Compiled]) -> None:
    done = run("--aot")
    assert done.exit_code == 0 and "3 compiled, 0 miss a gate" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "gfx942" in line]
    cells = ["mix_kernel", "gfx942", "4", "64", "0", "1024", "0", "1", "8", "300", "1.5"]
    assert row.split() == cells
    compiled[2].usage = Usage(512, 9, 1024, 0, 1, 8, 300, 1.5)
    done = run("--aot")
    assert done.exit_code == 1 and "(mix/decode/64): spills: 9 spilled" in done.stdout
    compiled[2].excused["spills"] = "few"
    done = run("--aot", "--json")
    (record,) = [one for one in json.loads(done.stdout)["compiled"] if one["target"] == "gfx942"]
    assert done.exit_code == 0 and record["wrong"] == [] and record["excused"] == {"spills": "few"}
    assert "mix_kernel on gfx942 may miss spills: few" in run("--aot").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bananas"], "unknown operator 'bananas'; there are pack_linear"),
        (["--aot", "bananas"], "unknown operator 'bananas'"),
        (["pack_linear"], "pack_linear has no kernel: a dense matmul"),
        (["--aot", "mla_plan"], "mla_plan has no kernel: it launches nothing"),
        (["--aot", "--target", "sm_1"], "unknown target 'sm_1'; there are sm_90, sm_100, gfx942"),
        (["--aot"], "TRITON_INTERPRET=1 is set"),
        (["--target", "sm_90"], "only with --aot"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == ExitCode.USAGE and message in " ".join(done.output.split())
