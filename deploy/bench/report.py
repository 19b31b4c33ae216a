"""What `expertmesh bench` prints."""

from pathlib import Path
from typing import Any

import msgspec
import torch
import typer
from rich.console import Console
from rich.table import Table

from expertmesh.deploy.bench.pairs import Spread
from expertmesh.deploy.bench.residual import K3, Result, Shape, compare, conditions
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder, size_text

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
        }  # fmt: skip
        print(msgspec.json.encode(report).decode())
    else:
        _print(results, agreed)
    raise typer.Exit(ExitCode.OK if agreed else ExitCode.FAILED)


def _print(results: list[Result], agreed: bool) -> None:
    console = Console(highlight=False)
    facts = ", ".join(f"{key} {value}" for key, value in conditions().items())
    table = Table(
        "model", "rows", "sites", "sources", "operators", "bytes moved", "unfused", "fused",
        "time", "CPU time", "difference", title="one decode step, fused / unfused",
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for one in results:
        table.add_row(
            one.shape.name,
            str(one.tokens),
            str(one.sites),
            f"2 to {one.most_sources}",
            f"{one.fused.operators} / {one.unfused.operators}",
            f"{size_text(one.fused.bytes_moved)} / {size_text(one.unfused.bytes_moved)}",
            f"{one.seconds.wall.second.median * 1e3:.2f} ms",
            f"{one.seconds.wall.first.median * 1e3:.2f} ms",
            _ratio(one.seconds.wall.ratio),
            _ratio(one.seconds.cpu.ratio),
            f"{one.difference:.1e}",
            style=None if one.equal else "red",
        )
    console.print(table)
    rounds = results[0].seconds.rounds
    console.print(f"medians and quartiles of {rounds} rounds, in turn; {facts}")
    console.print("equal in float32" if agreed else "[red]the two disagree[/]")
    console.print(NOTE)


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"
