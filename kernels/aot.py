"""Compiles every Triton kernel for GPUs that are not here, and judges what came out.

`python -m expertmesh.kernels.aot [OPERATOR ...] [--target sm_90,gfx942] [--json]` runs the
launchers of the cases (kernels/cases.py) on meta tensors, compiles what they would launch with the
specialisation that Triton would choose, and fails where a gate (kernels/gates.py) is missed. Exit
codes: 0 all gates held, 1 one was missed, 2 wrong usage.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import create_function_from_signature

from expertmesh.kernels.cases import Case, Make, cases_of
from expertmesh.kernels.gates import TARGETS, Gate, Target, Usage, misses
from expertmesh.kernels.launch import Launch, interpreted, recording
from expertmesh.kernels.registry import OPERATORS

NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NVIDIA_TENSOR_CORE = {
    "HMMA", "IMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA",
    "UTCIMMA",
}  # fmt: skip

READING = 1  # raise it when what is read of a kernel changes
MOST_ERROR = 1500  # characters; the compiler names the place first and the reason last


@dataclass(frozen=True)
class Specialisation:
    """One kernel as compiled for one target: all that its machine code depends on."""

    target: str
    module: str
    kernel: str
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    hints: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        return repr(self)

    @property
    def warps(self) -> int:
        return int(self.options["num_warps"])


@dataclass
class Compiled:
    """A specialisation, the cases that launch it, and what the compiler made of it. error: of the
    compiler. excused: reasons given by the cases, by gate."""

    what: Specialisation
    cases: list[str] = field(default_factory=list)
    grid: tuple[int, ...] = (0, 0, 0)
    excused: dict[str, str] = field(default_factory=dict)
    usage: Usage | None = None
    error: str = ""

    def missed(self) -> list[tuple[Gate, str]]:
        """All gates that it misses, excused or not."""
        if self.usage is None:
            return [("compile", self.error)]
        target = TARGETS[self.what.target]
        return list(misses(self.usage, target, self.what.warps, self.grid))

    def verdicts(self) -> Iterator[str]:
        """What is wrong: a gate that is missed without a reason, a reason that nothing needs."""
        missed: dict[str, str] = dict(self.missed())
        for gate, told in missed.items():
            if gate not in self.excused:
                yield f"{gate}: {told}"
        for gate in self.excused.keys() - missed.keys():
            yield f"{gate}: excused, and nothing is wrong"


def chosen_cases(operators: Sequence[str]) -> list[Case]:
    """Those of the named operators (none: of all) that Triton serves. Raises ValueError."""
    return [case for case in cases_of(operators) if not OPERATORS[case.operator].without_triton]


def launches_of(case: Case, target: str) -> list[Launch]:
    """What the operator launches on `target`."""
    home = OPERATORS[case.operator].home
    operator = getattr(import_module(f"expertmesh.kernels.{home}.triton_ops"), case.operator)
    with recording(target) as launches:
        operator(*case.arguments(Make("meta")))
    return launches


def specialise(launch: Launch, target: Target) -> Specialisation:
    """As Triton would at a real launch: of an argument its type, whether it is 1, whether 16
    divides it (of a tensor: its address, as far as its offset in its storage says)."""
    kernel = launch.kernel
    backend = make_backend(_gpu(target))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = {
        **launch.constants,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "debug": False,
    }
    bound, specialised, options = bind(*launch.arguments, **keywords)
    options, signature, constants, hints = kernel._pack_args(
        backend, keywords, bound, specialised, options
    )
    return Specialisation(
        target.name, kernel.module, kernel.__name__, signature, constants, hints, options.__dict__
    )


def collect(cases: Iterable[Case], targets: Iterable[str]) -> list[Compiled]:
    """Every specialisation that the cases launch, once, not compiled yet."""
    found: dict[str, Compiled] = {}
    for case in cases:
        for target in targets:
            for launch in launches_of(case, target):
                what = specialise(launch, TARGETS[target])
                one = found.setdefault(what.key, Compiled(what))
                if case.name not in one.cases:
                    one.cases.append(case.name)
                grid = (*launch.grid, 1, 1)[:3]
                one.grid = tuple(max(a, b) for a, b in zip(one.grid, grid, strict=True))
                for (where, kernel, gate), reason in case.exceptions.items():
                    if (where, kernel) == (target, what.kernel):
                        one.excused[gate] = reason
    return list(found.values())


def compile_all(compiled: Sequence[Compiled], processes: int) -> None:
    """Fills in `usage` or `error` of each. Triton keeps what it compiled in its own cache."""
    # Forked, not spawned: torch and Triton are loaded, and nothing has started a thread.
    pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"))
    with pool:
        for one, made in zip(
            compiled, pool.map(_compile, [one.what for one in compiled]), strict=True
        ):
            if isinstance(made, Usage):
                one.usage = made
            else:
                one.error = made


def _compile(what: Specialisation) -> Usage | str:
    """In a process of the pool: how it went."""
    kernel = getattr(import_module(what.module), what.kernel)
    source = ASTSource(kernel, what.signature, what.constants, what.hints)
    began = time.perf_counter()
    try:
        made = triton.compile(source, target=_gpu(TARGETS[what.target]), options=what.options)
    except Exception as error:  # whatever the compiler raises is the result
        return f"{type(error).__name__}: {error}".strip()[-MOST_ERROR:]
    seconds = time.perf_counter() - began
    # Taking machine code apart costs as much as compiling it: kept beside it, in Triton's cache.
    cache, name = get_cache_manager(made.hash), f"usage-{READING}.json"
    kept = cache.get_file(name)
    if kept is not None:
        return Usage(**json.loads(Path(kept).read_text()))
    usage = _amd_usage(made, seconds) if "amdgcn" in made.asm else _nvidia_usage(made, seconds)
    cache.put(json.dumps(asdict(usage)), name, binary=False)
    return usage


def _gpu(target: Target) -> GPUTarget:
    return GPUTarget(target.backend, target.architecture, target.wave)


def _dots(made: Any) -> int:
    return len(re.findall(r"\btt\.dot(?:_scaled)?\b", made.asm["ttir"]))


def _nvidia_usage(made: Any, seconds: float) -> Usage:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        assembly = _run("nvdisasm", "-c", file.name)
    registers = re.search(r"REG:(\d+)", resources)
    assert registers is not None, resources
    operations = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", assembly, re.M
    )
    return Usage(
        registers=int(registers[1]),
        spills=operations.count("STL"),
        shared=made.metadata.shared,
        tensor_memory=getattr(made.metadata, "tmem_size", None) or 0,
        dots=_dots(made),
        tensor_core=sum(one in NVIDIA_TENSOR_CORE for one in operations),
        instructions=sum(one != "NOP" for one in operations),
        seconds=seconds,
    )


def _run(tool: str, *arguments: str) -> str:
    command = [str(NVIDIA_TOOLS / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _amd_usage(made: Any, seconds: float) -> Usage:
    assembly = made.asm["amdgcn"]

    def told(key: str) -> int:
        found = re.search(rf"^\s+\.{key}:\s+(\d+)", assembly, re.M)
        assert found is not None, key
        return int(found[1])

    operations = re.findall(r"^\t([a-z]+_\w+)", assembly, re.M)
    return Usage(
        registers=told("vgpr_count"),
        spills=told("vgpr_spill_count"),
        shared=max(made.metadata.shared, told("group_segment_fixed_size")),
        tensor_memory=0,
        dots=_dots(made),
        tensor_core=sum(one.startswith(("v_mfma", "v_smfmac")) for one in operations),
        instructions=sum(one != "s_nop" for one in operations),
        seconds=seconds,
    )


def check(cases: Iterable[Case], targets: Sequence[str], processes: int) -> list[Compiled]:
    """Everything that the cases launch, compiled for `targets`."""
    compiled = collect(cases, targets)
    compile_all(compiled, processes)
    return compiled


def as_record(one: Compiled) -> dict[str, Any]:
    """For JSON."""
    return {
        "kernel": one.what.kernel,
        "target": one.what.target,
        "cases": one.cases,
        "warps": one.what.warps,
        "stages": one.what.options["num_stages"],
        "constants": {
            list(one.what.signature)[place[0]]: str(value)
            for place, value in one.what.constants.items()
        },
        "pointers": {
            name: kind for name, kind in one.what.signature.items() if str(kind).startswith("*")
        },
        "grid": one.grid,
        "usage": None if one.usage is None else asdict(one.usage),
        "wrong": list(one.verdicts()),
        "excused": one.excused,
    }


COLUMNS = (
    "kernel", "target", "warps", "regs", "spills", "shared", "tmem", "dots", "mma", "instr.", "s",
)  # fmt: skip


def as_row(one: Compiled) -> list[str]:
    """Under COLUMNS."""
    head = [one.what.kernel, one.what.target, str(one.what.warps)]
    if one.usage is None:
        return head + ["-"] * (len(COLUMNS) - len(head))
    used = one.usage
    numbers = (
        used.registers, used.spills, used.shared, used.tensor_memory, used.dots, used.tensor_core,
        used.instructions,
    )  # fmt: skip
    return [*head, *map(str, numbers), f"{used.seconds:.1f}"]


def _print(compiled: Sequence[Compiled]) -> None:
    rows = [list(COLUMNS), *map(as_row, compiled)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, one in zip(rows, [None, *compiled], strict=True):
        cells = [
            cell.ljust(width) if at < 2 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells), " ".join(one.cases) if one else "cases", sep="  ")
        for verdict in one.verdicts() if one else ():
            print(f"    WRONG  {verdict}".replace("\n", "\n        "))
        for gate, reason in one.excused.items() if one else ():
            print(f"    excused  {gate}: {reason}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m expertmesh.kernels.aot", description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="default: all")
    parser.add_argument("--target", default=",".join(TARGETS), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    targets = asked.target.split(",")
    if unknown := [one for one in targets if one not in TARGETS]:
        parser.error(f"unknown target {unknown[0]!r}; there are {', '.join(TARGETS)}")
    try:
        cases = chosen_cases(asked.operators)
    except ValueError as error:
        parser.error(str(error))
    if interpreted():
        parser.error("TRITON_INTERPRET=1 is set: an interpreting process compiles nothing")
    compiled = check(cases, targets, asked.processes)
    if asked.json:
        print(json.dumps([as_record(one) for one in compiled]))
    else:
        _print(compiled)
    wrong = sum(bool(list(one.verdicts())) for one in compiled)
    print(f"{len(compiled)} compiled, {wrong} wrong", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
