"""What `expertmesh eval longcontext` prints and writes."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import ValidationError

from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.cases import Maker
from expertmesh.deploy.eval.console import progress_console, report_console, report_table
from expertmesh.deploy.eval.driver import EngineEnded
from expertmesh.deploy.eval.filler import Filler, Noise, Prose, Text
from expertmesh.deploy.eval.longcontext import GATE, Cell, Mode, Plan, evaluate
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import TASKS
from expertmesh.deploy.exit_codes import ExitCode, Refused
from expertmesh.deploy.preflight import check_folder

ROOM_TOKENS = 1024  # for what stands after a text
COLUMNS = (
    "task", "tokens", "mode", "right", "95 %", "points lost", "same tokens", "nats/token", "KL",
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
    pages: int
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
    subject = Subject(wish.model, max(wish.lengths) + ROOM_TOKENS)
    console = progress_console()
    try:
        cells = evaluate(
            subject, Maker(subject.tokenizer, filler), plan, lambda line: console.print(line)
        )
    except EngineEnded as error:
        raise Refused(ExitCode.FAILED, str(error)) from None
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
    """longcontext.json, and PNGs of depth against length and of recall against length."""
    from expertmesh.deploy.eval.plots import plot_depths, plot_recall

    folder.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "longcontext.json").write_bytes(text + b"\n")
    plot_recall(cells, folder / "recall.png")
    plot_depths(cells, folder / "depths.png")


def _tasks(wish: Wish) -> list[str]:
    for task in wish.tasks:
        if task not in TASKS:
            raise Refused(ExitCode.USAGE, f"no task {task!r}", f"there are {', '.join(TASKS)}")
    return wish.tasks or list(TASKS)


def _modes(wish: Wish) -> list[Mode]:
    try:
        state = StateSettings.model_validate(
            {
                "window_tokens": wish.window, "sink_tokens": wish.sinks,
                "select_pages": wish.pages, "select_mass": wish.mass, "codec": wish.codec,
            }
        )  # fmt: skip
        return [
            Mode(name, "exact", state, blind=True)
            if name == "blind"
            else Mode(name, StateSettings.model_validate({"kv_mode": name}).kv_mode, state)
            for name in wish.modes
        ]
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
            one.task, str(one.length), one.mode, f"{recall.right}/{recall.n}",
            f"{recall.low:.0%}-{recall.high:.0%}",
            "" if loss is None else f"{loss.points:+.1f} ({loss.low:+.1f} to {loss.high:+.1f})",
            "" if loss is None else f"{one.same.share:.1%}", f"{one.nats:.3f}",
            "" if loss is None else f"{one.divergence:.4f}",
            style=None if one.judged else "dim",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"dim: the first mode gets less than {GATE:.0%}, so a loss says little; questions about "
        "one text count apart"
    )
