"""What `expertmesh eval longcontext` prints and writes."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError

from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.console import progress_console, report_console, report_table
from expertmesh.deploy.eval.filler import Filler, Noise, Prose, Text
from expertmesh.deploy.eval.longcontext import GATE, ROOM_TOKENS, Cell, Plan, evaluate
from expertmesh.deploy.eval.reading import Mode
from expertmesh.deploy.eval.statistics import Share
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import TASKS, check_tasks
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder

COLUMNS = (
    "task", "tokens", "mode", "on device", "right", "95 %", "points lost", "need latents", "tokens",
    "same", "KL",
)  # fmt: skip


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The command's options."""

    model: Path
    tasks: list[str]
    lengths: list[int]
    modes: list[str]
    probes: int
    seed: int
    filler: str
    window: int
    sinks: int
    pages: list[int]
    mass: float
    codec: str
    out: Path | None
    threads: int
    as_json: bool


def run_longcontext(wish: Wish) -> None:
    """Raises Refused."""
    plan = Plan(_tasks(wish), wish.lengths, _modes(wish), wish.probes, wish.seed)
    filler = _filler(wish.filler)
    check_folder(wish.model)
    torch.set_num_threads(wish.threads)
    subject = Subject(wish.model, max(wish.lengths) + 2 * ROOM_TOKENS)
    console = progress_console()
    cells = evaluate(
        subject, Maker(subject.tokenizer, filler), plan, lambda line: console.print(line)
    )
    report: dict[str, Any] = {
        "eval": "longcontext",
        "conditions": {
            "model": wish.model.name, "positions_promised": subject.promised, "seed": wish.seed,
            "filler": wish.filler, "window_tokens": wish.window, "sink_tokens": wish.sinks,
            "select_pages": wish.pages, "select_mass": wish.mass, "codec": wish.codec,
            "dtype": "float32", "device": "cpu", "gate": GATE,
        },
        "cells": cells,
    }  # fmt: skip
    if wish.out is not None:
        write(wish.out, report, cells)
    if wish.as_json:
        print(msgspec.json.encode(report).decode())
    else:
        print_cells(cells)


def write(folder: Path, report: dict[str, Any], cells: list[Cell]) -> None:
    """longcontext.json, and PNGs: recall against length, depth against length, and what is known
    against what stays resident."""
    from expertmesh.deploy.eval.curves import plot_curves
    from expertmesh.deploy.eval.plots import plot_depths, plot_recall

    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "longcontext.json").write_bytes(text + b"\n")
    plot_recall(cells, folder / "recall.png")
    plot_depths(cells, folder / "depths.png")
    plot_curves(cells, folder / "curves.png")


def _tasks(wish: Wish) -> list[str]:
    check_tasks(wish.tasks)
    return wish.tasks or list(TASKS)


def _modes(wish: Wish) -> list[Mode]:
    """select once for each number of pages, the fewest first."""
    known = {
        "window_tokens": wish.window, "sink_tokens": wish.sinks, "select_mass": wish.mass,
        "codec": wish.codec,
    }  # fmt: skip
    try:
        modes = []
        for name in wish.modes:
            reads = "exact" if name == "blind" else name
            for pages in sorted(wish.pages) if name == "select" else [max(wish.pages)]:
                state = StateSettings.model_validate(
                    known | {"kv_mode": reads, "select_pages": pages}
                )
                modes.append(
                    Mode(f"select {pages}", "select", state)
                    if name == "select"
                    else Mode(name, "blind" if name == "blind" else state.kv_mode, state)
                )
        return modes
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(
            ExitCode.USAGE, f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None


def _filler(name: str) -> Filler:
    if name in ("prose", "noise"):
        return Prose() if name == "prose" else Noise()
    try:
        return Text(Path(name).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Refused(ExitCode.USAGE, f"filler {name}: {error}") from None


def print_cells(cells: list[Cell]) -> None:
    console, table = report_console(), report_table("Recall over long contexts", COLUMNS, 3)
    for one in cells:
        recall, loss = one.recall, one.loss
        table.add_row(
            one.task, str(one.length), one.mode, f"{one.share:.1%}", _of(recall),
            f"{recall.low:.0%}-{recall.high:.0%}",
            "" if loss is None else f"{loss.points:+.1f} ({loss.low:+.1f} to {loss.high:+.1f})",
            _of(one.needs), _of(one.needs_tokens),
            "" if loss is None else f"{one.same.share:.1%}",
            "" if loss is None else f"{one.divergence:.2g}", style=None if one.judged else "dim",
        )  # fmt: skip
    console.print(table)
    console.print(
        "need latents: questions that the first mode gets right and the blind one wrong, tokens "
        "that the two would give differently; as the first mode, of how many. "
        f"dim: the first mode gets less than {GATE:.0%}. Questions about one text count apart"
    )


def _of(share: Share | None) -> str:
    return "" if share is None else f"{share.right}/{share.n}"
