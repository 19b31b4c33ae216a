"""Curves of `expertmesh eval longcontext`, as PNG."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expertmesh.deploy.eval.longcontext import BINS, Cell

COLOURS = ("#1b5e9e", "#d95f0e", "#2a8f5d", "#8e4585", "#777777")
COLUMNS = 5


def plot_recall(cells: Sequence[Cell], path: Path) -> None:
    """Share of right answers against length, a panel per task, a line per mode, Wilson bars."""
    tasks, modes = ordered(c.task for c in cells), ordered(c.mode for c in cells)
    figure, axes = panels(len(tasks))
    for task, axis in zip(tasks, axes, strict=False):
        for at, mode in enumerate(modes):
            own = [c for c in cells if (c.task, c.mode) == (task, mode)]
            shares = [c.recall.share for c in own]
            below = [c.recall.share - c.recall.low for c in own]
            above = [c.recall.high - c.recall.share for c in own]
            axis.errorbar(
                [c.length * (1 + 0.03 * at) for c in own], shares, yerr=[below, above],
                marker="o", markersize=4, capsize=2, linewidth=1.2,
                color=COLOURS[at % len(COLOURS)], label=mode,
            )  # fmt: skip
        lengths = sorted({c.length for c in cells})
        log2_axis(axis, lengths)
        axis.set_ylim(-0.03, 1.03)
        axis.set_title(task)
    axes[0].set_ylabel("share right")
    figure.supxlabel("tokens of text", fontsize=10)
    axes[0].legend(fontsize=8, loc="lower left")
    save(figure, path)


def plot_depths(cells: Sequence[Cell], path: Path) -> None:
    """Share of right answers by length and by where the answer stands, a panel per task and mode;
    numbers are right / asked."""
    tasks = [t for t in ordered(c.task for c in cells) if _deep(cells, t)]
    modes = ordered(c.mode for c in cells)
    if not tasks:
        return
    lengths = sorted({c.length for c in cells})
    figure = Figure(
        figsize=(1.2 + (1.0 + 0.75 * len(lengths)) * len(tasks), 0.8 + 2.5 * len(modes)),
        layout="constrained",
    )
    grid = figure.subplots(len(modes), len(tasks), squeeze=False, sharex=True, sharey=True)
    for row, mode in enumerate(modes):
        for column, task in enumerate(tasks):
            axis = grid[row][column]
            own = {c.length: c.depths for c in cells if (c.task, c.mode) == (task, mode)}
            _depth_panel(axis, [own.get(length, [(0, 0)] * BINS) for length in lengths])
            axis.set_xticks(range(len(lengths)), [tokens(n) for n in lengths])
            axis.set_yticks(range(BINS), [f"{100 * b // BINS}-{100 * (b + 1) // BINS} %"
                                          for b in range(BINS)])  # fmt: skip
            axis.set_title(f"{task}, {mode}", fontsize=9)
    figure.supylabel("depth of the answer in the text", fontsize=10)
    figure.supxlabel("tokens of text", fontsize=10)
    save(figure, path)


def _depth_panel(axis: Axes, depths: list[list[tuple[int, int]]]) -> None:
    shares = [
        [column[b][0] / column[b][1] if column[b][1] else float("nan") for column in depths]
        for b in range(BINS)
    ]
    axis.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for x, column in enumerate(depths):
        for y, (right, n) in enumerate(column):
            if n:
                dark = not 0.2 < right / n < 0.9
                axis.text(
                    x, y, f"{right}/{n}", ha="center", va="center", fontsize=7,
                    color="white" if dark else "black",
                )  # fmt: skip


def _deep(cells: Sequence[Cell], task: str) -> bool:
    """Whether its answers stand anywhere but at the beginning."""
    return any(n for c in cells if c.task == task for _, n in c.depths[1:])


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels that share their y axis, unused ones left out."""
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(0.6 + 2.5 * columns, 0.5 + 2.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    axes = [axis for row in grid for axis in row]
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def log2_axis(axis: Axes, values: Sequence[int]) -> None:
    """The x axis in octaves, a label per value."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [tokens(value) for value in values])
    axis.minorticks_off()
    axis.grid(alpha=0.3)


def tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)


def ordered(names: Iterable[str]) -> list[str]:
    """Each once, in order of appearance."""
    return list(dict.fromkeys(names))
