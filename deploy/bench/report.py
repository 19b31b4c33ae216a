"""What `expertmesh bench` prints."""

from pathlib import Path
from typing import Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from expertmesh.deploy.bench.launches import why_not
from expertmesh.deploy.bench.pairs import Spread
from expertmesh.deploy.bench.residual import K3, Result, Shape, compare, conditions
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder

NOTE = "The model uses the fused operator everywhere but before the head."


def run_residual(
    model: Path, tokens: list[int], rounds: int, threads: int, with_k3: bool, as_json: bool
) -> None:
    """Raises Refused, or Exit with FAILED when the two disagree."""
    shape = Shape.of(model.name, check_folder(model))
    if shape is None:
        raise Refused(ExitCode.USAGE, f"{model.name} has ordinary residuals: nothing is mixed")
    torch.set_num_threads(threads)
    shapes = [K3, shape] if with_k3 else [shape]
    results = [compare(one, rows, rounds) for one in shapes for rows in tokens]
    agreed = all(one.equal for one in results)
    if as_json:
        report: dict[str, Any] = {
            "bench": "residual", "conditions": conditions(), "results": results, "note": NOTE,
            "triton": why_not() or "launches counted, none made; bfloat16",
        }  # fmt: skip
        print(msgspec.json.encode(report).decode())
    else:
        _print(results, agreed)
    raise typer.Exit(ExitCode.OK if agreed else ExitCode.FAILED)


def _print(results: list[Result], agreed: bool) -> None:
    console = Console(highlight=False)
    console.print("Attention Residuals of one decode step: fused / unfused")
    _print_times(console, results)
    rounds = results[0].seconds.rounds
    facts = ", ".join(f"{key} {value}" for key, value in conditions().items())
    console.print(f"medians and quartiles of {rounds} rounds, in turn; {facts}")
    most = max(one.difference for one in results)
    told = "equal in float32" if agreed else "[red]the two disagree[/]"
    console.print(f"{told}: at most {most:.0e} apart")
    _print_operators(console, results)
    console.print("operators that touch data; bytes of operands and results each time")
    reason = why_not()
    if reason:
        console.print(f"a GPU's kernels are not counted: {reason}")
    else:
        _print_kernels(console, results)
        console.print("recorded, none was made; bytes once per kernel; floor: those at 4.8 TB/s")
    console.print(NOTE)


def _print_times(console: Console, results: list[Result]) -> None:
    table = _table("this CPU, time", "unfused", "fused", "time", "CPU time")
    for one in results:
        wall, cpu = one.seconds.wall, one.seconds.cpu
        table.add_row(
            *_row(one),
            f"{wall.second.median * 1e3:.1f} ms",
            f"{wall.first.median * 1e3:.1f} ms",
            _ratio(wall.ratio),
            _ratio(cpu.ratio),
            style=None if one.equal else "red",
        )
    console.print(table)


def _print_operators(console: Console, results: list[Result]) -> None:
    table = _table("this CPU, torch", "sites", "sources", "operators", "bytes moved", "ratio")
    for one in results:
        table.add_row(
            *_row(one),
            str(one.sites),
            f"1 to {one.most_sources}",
            f"{one.fused.operators} / {one.unfused.operators}",
            *_bytes(one.fused.bytes_moved, one.unfused.bytes_moved),
        )
    console.print(table)


def _print_kernels(console: Console, results: list[Result]) -> None:
    title = "a GPU, Triton, bfloat16: kernels launched, bytes moved"
    table = _table(title, "kernels", "bytes moved", "ratio", "H200 floor")
    for one in results:
        if one.triton is None:
            continue
        fused, unfused = one.triton.fused, one.triton.unfused
        table.add_row(
            *_row(one),
            f"{fused.kernels} / {unfused.kernels}",
            *_bytes(fused.bytes_moved, unfused.bytes_moved),
            f"{fused.floor_us:.3g} / {unfused.floor_us:.3g} us",
        )
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table("model", "rows", *columns, title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _row(one: Result) -> tuple[str, str]:
    return one.shape.name, str(one.tokens)


def _bytes(fused: int, unfused: int) -> tuple[str, str]:
    """Both in the unit of the larger, and their ratio."""
    unit, scale = next(
        (unit, scale) for unit, scale in UNITS if unfused >= scale or scale == UNITS[-1][1]
    )
    return f"{fused / scale:.3g} / {unfused / scale:.3g} {unit}", f"{fused / unfused:.2f}"


UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"
