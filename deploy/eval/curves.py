"""What is still known of a text against what of it stays on the device, as PNG."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from expertmesh.deploy.eval.longcontext import Cell
from expertmesh.deploy.eval.plots import COLOURS, ordered, save
from expertmesh.deploy.eval.statistics import Share

MARKS = {"blind": "x", "select": "o", "offload": "D", "exact": "s"}
ROWS = ("share right", "of those that\nneed latents", "of tokens that\nneed latents",
        "KL from exact, nats")  # fmt: skip
LEAST_NATS = 1e-9  # what is equal to the last bit stands here
DOTTED = 0.25


def plot_curves(cells: Sequence[Cell], path: Path) -> None:
    """Against the share of the latents on the device: right answers; those of the questions, and of
    the tokens, that need latents; and the divergence. A column per task, a colour per length, a
    mark per way of reading, Wilson bars. A line leads from blind over `select` to exact."""
    tasks = ordered(one.task for one in cells)
    lengths = sorted({one.length for one in cells})
    figure = Figure(figsize=(max(5.5, 0.8 + 3.2 * len(tasks)), 8.4), layout="constrained")
    grid = figure.subplots(len(ROWS), len(tasks), squeeze=False, sharex=True, sharey="row")
    for column, task in enumerate(tasks):
        axes = [row[column] for row in grid]
        axes[0].set_title(task)
        for at, length in enumerate(lengths):
            own = [one for one in cells if (one.task, one.length) == (task, length)]
            _curve(sorted(own, key=lambda one: one.share), axes, COLOURS[at % len(COLOURS)])
        for axis in axes:
            axis.axvline(DOTTED, color="black", linewidth=0.8, linestyle=":")
            axis.grid(alpha=0.3)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.3g} %")
    for row, name in zip(grid, ROWS, strict=True):
        row[0].set_ylabel(name)
        if name != ROWS[-1]:
            row[0].set_ylim(-0.05, 1.05)
    if any(one.reads != "exact" for one in cells):
        grid[-1][0].set_yscale("log")
    used = {one.reads for one in cells}
    _legend(figure, [what for what in MARKS if what in used], lengths)
    figure.supxlabel("of the latents on the device (dotted: a quarter)", fontsize=10)
    save(figure, path)


def _curve(own: Sequence[Cell], axes: Sequence[Axes], colour: str) -> None:
    """One task and length: points by what they hold."""
    for at, axis in enumerate(axes[:-1]):
        shares = [(one, (one.recall, one.needs, one.needs_tokens)[at]) for one in own]
        _shares(axis, [(one, share) for one, share in shares if share and share.n], colour)
    apart = [one for one in own if one.reads != "exact"]
    nats = [max(one.divergence, LEAST_NATS) for one in apart]
    axes[-1].plot([one.share for one in apart], nats, color=colour, linewidth=0.8, alpha=0.6)
    for one, height in zip(apart, nats, strict=True):
        axes[-1].plot(one.share, height, MARKS[one.reads], markersize=5, color=colour)


def _shares(axis: Axes, known: Sequence[tuple[Cell, Share]], colour: str) -> None:
    axis.plot(
        [one.share for one, _ in known], [share.share for _, share in known],
        color=colour, linewidth=0.8, alpha=0.6,
    )  # fmt: skip
    for one, share in known:
        axis.errorbar(
            one.share, share.share, yerr=[[share.share - share.low], [share.high - share.share]],
            marker=MARKS[one.reads], markersize=5, capsize=2, linewidth=0.8, color=colour,
        )  # fmt: skip


def _legend(figure: Figure, reads: Sequence[str], lengths: Sequence[int]) -> None:
    marks = [
        Line2D([], [], color="grey", marker=MARKS[what], linestyle="", label=what) for what in reads
    ]
    marks += [
        Line2D([], [], color=COLOURS[at % len(COLOURS)], label=f"{length} tokens")
        for at, length in enumerate(lengths)
    ]
    figure.legend(handles=marks, fontsize=8, loc="outside upper center", ncols=len(marks))
