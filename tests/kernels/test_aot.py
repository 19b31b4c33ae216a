"""Every kernel compiled at K3's shapes for GPUs that are not here, and judged.

An interpreting process compiles nothing, so the compiling is done by others.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expertmesh.kernels import aot
from expertmesh.kernels.cases import all_cases
from expertmesh.kernels.gates import LEAST_INSTRUCTIONS, TARGETS, Usage, misses
from expertmesh.kernels.registry import OPERATORS

ROOT = Path(__file__).resolve().parents[2]
TRITON = {name for name, operator in OPERATORS.items() if not operator.without_triton}
# The Triton backend has the operator, and nothing to do for it.
NO_LAUNCH = {"mla_plan"}
MOST_SECONDS = 900  # a machine whose cores others use, and an empty cache


def compiling(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=MOST_SECONDS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    done = compiling("expertmesh.kernels.aot", "--json")
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(MOST_SECONDS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_passes_the_gates(compiled: list[dict[str, Any]], target: str) -> None:
    mine = [one for one in compiled if one["target"] == target]
    wrong = [f"{one['kernel']}: {verdict}" for one in mine for verdict in one["wrong"]]
    assert not wrong, "\n".join(wrong)
    served = {case.partition("/")[0] for one in mine for case in one["cases"]}
    assert served == TRITON - NO_LAUNCH, "launches nothing"


@pytest.mark.timeout(MOST_SECONDS)
def test_one_binary_serves_every_size(compiled: list[dict[str, Any]]) -> None:
    """Of two that differ in nothing but a number or an address, the second would be compiled when
    that number first comes up: in the middle of serving. Constants are in capitals."""
    cases: dict[str, list[list[str]]] = {}
    for one in compiled:
        chosen = {name: value for name, value in one["constants"].items() if name[0].isupper()}
        same = (one["kernel"], one["target"], one["warps"], one["stages"], one["pointers"], chosen)
        cases.setdefault(json.dumps(same), []).append(one["cases"])
    twice = [f"{same}: {found}" for same, found in cases.items() if len(found) > 1]
    assert not twice, "\n".join(twice)


def test_cases_cover_every_operator_and_have_floors() -> None:
    cases = all_cases()
    assert {case.operator for case in cases} >= TRITON - NO_LAUNCH
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.work.bytes > 0 for case in cases)
    assert all(case.operator in OPERATORS for case in cases)


@pytest.mark.timeout(MOST_SECONDS)
def test_kernels_that_would_be_useless_are_told() -> None:
    done = compiling("tests.kernels.wrong_kernels")
    assert done.returncode == 0, done.stderr
    assert {kernel: {*missed} for kernel, missed in json.loads(done.stdout).items()} == {
        "scalar_kernel sm_90": {"spills", "tensor cores", "grid"},
        "hoarding_kernel sm_90": {"shared"},
        "empty_kernel sm_90": {"instructions"},
        "scalar_kernel gfx942": {"grid"},
        "hoarding_kernel gfx942": {"shared"},
        "empty_kernel gfx942": {"instructions", "threads"},
    }


GOOD = {
    "registers": 255, "spills": 0, "shared": 65_536, "tensor_memory": 512, "dots": 1,
    "tensor_core": 1, "instructions": LEAST_INSTRUCTIONS, "seconds": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"spills": 1}, ["spills"]),
        ({"shared": 232_449}, ["shared"]),
        ({"tensor_memory": 513}, ["tensor memory"]),
        ({"tensor_core": 0}, ["tensor cores"]),
        ({"tensor_core": 0, "dots": 0}, []),
        ({"instructions": LEAST_INSTRUCTIONS - 1}, ["instructions"]),
    ],
    ids=str,
)
def test_gates(target: Any, change: dict[str, int], missed: list[str]) -> None:
    usage = Usage(**(GOOD | change))
    assert [gate for gate, _ in misses(usage, target, 4, (1, 65_535, 65_535))] == missed


def test_an_excuse_that_nothing_needs_is_wrong() -> None:
    what = aot.Specialisation("sm_90", "", "kernel", {}, {}, {}, {"num_warps": 4})
    one = aot.Compiled(what, grid=(1, 1, 1), usage=Usage(**(GOOD | {"spills": 3})))
    assert list(one.verdicts()) == ["spills: 3 spilled"]
    one.excused = {"spills": "a reason"}
    assert list(one.verdicts()) == []
    one.usage = Usage(**GOOD)
    assert list(one.verdicts()) == ["spills: excused, and nothing is wrong"]
    one.usage, one.error = None, "CompilationError: at 3:4"
    assert "compile: CompilationError: at 3:4" in list(one.verdicts())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bananas"], "unknown operator 'bananas'; there are pack_linear"),
        (["rms_norm", "pack_linear"], "pack_linear has no kernel: a dense matmul"),
        (["--target", "sm_1"], "unknown target 'sm_1'; there are sm_90"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        aot.main(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        aot.main([])
    assert "an interpreting process compiles nothing" in capsys.readouterr().err
