"""What `expertmesh bench kernels` prints."""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from expertmesh.deploy.bench.kernels import Floor, floors
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import size_text
from expertmesh.kernels.cases import Case, cases_of
from expertmesh.kernels.gates import TARGETS
from expertmesh.kernels.launch import interpreted

FILE_WIDTH = 120


def run_floors(operators: list[str], as_json: bool) -> None:
    """Raises Refused, or Exit with FAILED when an operator failed on the GPU."""
    cases = _cases(operators)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = list(floors(cases, gpu is not None))
    failed = any(one.measured is not None and one.measured.error for one in found)
    if as_json:
        report: dict[str, Any] = {
            "bench": "kernels", "floors_of": "H200", "gpu": gpu, "torch": str(torch.__version__),
            "cases": found,
        }  # fmt: skip
        print(msgspec.json.encode(report).decode())
    else:
        _print_floors(found, gpu)
    raise typer.Exit(ExitCode.FAILED if failed else ExitCode.OK)


def run_aot(operators: list[str], targets: list[str], as_json: bool) -> None:
    """Raises Refused, or Exit with FAILED when a gate is missed."""
    _cases(operators)
    for name in targets:
        if name not in TARGETS:
            told = f"unknown target {name!r}; there are {', '.join(TARGETS)}"
            raise Refused(ExitCode.USAGE, told)
    if interpreted():
        raise Refused(ExitCode.USAGE, "TRITON_INTERPRET=1 is set: nothing is compiled then")
    try:
        from expertmesh.kernels import aot
    except ImportError as error:
        hint = "pip install 'expertmesh[gpu]'"
        raise Refused(ExitCode.USAGE, f"kernels are compiled by Triton: {error}", hint) from error
    compiled = aot.check(
        aot.chosen_cases(operators), targets or list(TARGETS), len(os.sched_getaffinity(0))
    )
    wrong = [one for one in compiled if list(one.verdicts())]
    if as_json:
        records = [aot.as_record(one) for one in compiled]
        print(msgspec.json.encode({"bench": "kernels --aot", "compiled": records}).decode())
        raise typer.Exit(ExitCode.FAILED if wrong else ExitCode.OK)
    console = _console()
    table = Table(
        *aot.COLUMNS, title="kernels compiled at K3's shapes", box=SIMPLE, pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    for at, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if at > 1 else "left"
    for one in compiled:
        table.add_row(*aot.as_row(one), style="red" if one in wrong else None)
    console.print(table)
    console.print(
        "regs: per thread. shared: bytes. tmem: columns. mma: instructions of the tensor cores. "
        "s: to compile"
    )
    for one in compiled:
        name = f"{one.what.kernel} on {one.what.target}"
        for gate, reason in one.excused.items():
            console.print(f"{name} may miss {gate}: {escape(reason)}")
        for verdict in one.verdicts():
            console.print(f"[red]{name}[/] ({', '.join(one.cases)}): {escape(verdict)}")
    colour = "red" if wrong else "green"
    console.print(f"{len(compiled)} compiled, [{colour}]{len(wrong)} miss a gate[/]")
    raise typer.Exit(ExitCode.FAILED if wrong else ExitCode.OK)


def _console() -> Console:
    console = Console(highlight=False)
    # A file or a pipe has no width, and rich would take 80 columns.
    return console if console.is_terminal else Console(highlight=False, width=FILE_WIDTH)


def _cases(operators: Sequence[str]) -> list[Case]:
    try:
        return cases_of(operators)
    except ValueError as error:
        raise Refused(ExitCode.USAGE, str(error)) from error


def _flops_text(flops: int) -> str:
    return f"{flops / 1e9:,.1f} GF" if flops >= 1e9 else f"{flops / 1e6:,.1f} MF"


def _print_floors(found: list[Floor], gpu: str | None) -> None:
    console = _console()
    table = Table(
        "operator", "case", "moves", "computes", "H200 floor", "bound by",
        title="kernels at K3's shapes", box=SIMPLE, pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.columns[1].min_width = 12
    if gpu is not None:
        for name in ("by", "measured", "ratio"):
            table.add_column(name)
    for at, column in enumerate(table.columns):
        column.no_wrap = at != 1
        column.justify = "right" if at in (2, 3, 4, 7, 8) else "left"
    for one in found:
        cells = [
            one.operator, f"{one.phase}, {one.size}", size_text(one.bytes),
            f"{_flops_text(one.flops)} {one.unit}", f"{one.us:,.1f} us", one.bound,
        ]  # fmt: skip
        if one.measured is not None:
            done = one.measured.us is not None
            cells += [one.measured.by, f"{one.measured.us:,.1f} us" if done else "[red]failed[/]"]
            cells += [f"{one.ratio:.2f}" if one.ratio is not None else ""]
        table.add_row(*cells)
    console.print(table)
    console.print("floor: each byte once at 4.8 TB/s, or each operation at the unit's peak rate")
    if gpu is None:
        console.print("measured: nothing, there is no GPU; --aot compiles the kernels without one")
    else:
        console.print(f"measured: medians on {gpu}, cold caches")
    for one in found:
        if one.measured is not None and one.measured.error:
            console.print(f"[red]{one.operator}/{one.phase}[/]: {escape(one.measured.error)}")
