"""A routing report as a picture: which actors and which experts of each layer carry how much.

Everything is relative to an even share, on one scale: white is even, red is more, blue is less.
"""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from expertmesh.cluster.ledger.report import Report

DPI = 130
# Cells with a number in them stay legible up to so many actors and layers.
NUMBERED_RANKS, NUMBERED_LAYERS = 8, 16
# Marks of the colour bars. Beyond the last all is the same red: one hot expert must not pale the
# rest.
EXPERT_SCALE, RANK_SCALE = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0), (0.0, 0.5, 1.0, 1.5, 2.0)


def write_heat_map(report: Report, path: Path) -> None:
    """A PNG. Raises OSError."""
    experts_LE = _relative([one.loads for one in report.layers])
    ranks_LA = _relative([one.rank_loads for one in report.layers])
    has_ranks = ranks_LA.shape[1] > 0
    layers = [one.layer for one in report.layers]
    height = min(14.0, 2.6 + 0.24 * max(6, len(layers)))
    # At least a pixel for every expert.
    widths = [3.2, max(7.4, experts_LE.shape[1] / 80)][0 if has_ranks else 1 :]
    figure = Figure(figsize=(sum(widths) + 2, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1, len(widths), width_ratios=widths)
    if has_ranks:
        _draw(figure.add_subplot(grid[0]), ranks_LA, layers, RANK_SCALE, "expert actor", True)
    axes = figure.add_subplot(grid[-1])
    _draw(axes, experts_LE, layers, EXPERT_SCALE, "expert", not has_ranks)
    _mark_dead(axes, report)
    figure.suptitle(_title(report), x=0.01, ha="left", fontsize=11)
    figure.savefig(path, format="png")


def _relative(rows: list[list[float]]) -> np.ndarray:
    """[L, columns], 1 = an even share; NaN in layers without load."""
    load: np.ndarray = np.array(rows, dtype=np.float64).reshape(len(rows), -1)
    if load.shape[1] == 0:
        return load
    mean = load.mean(1, keepdims=True)
    shares: np.ndarray = np.full_like(load, np.nan)
    np.divide(load, mean, out=shares, where=mean > 0)
    return shares


def _draw(
    axes: Axes,
    values: np.ndarray,
    layers: list[int],
    scale: tuple[float, ...],
    what: str,
    labelled: bool,
) -> None:
    colours = colormaps["RdBu_r"].with_extremes(bad="0.85")  # grey: a layer without load
    norm = TwoSlopeNorm(1.0, scale[0], scale[-1])
    image = axes.imshow(values, aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
    axes.set_title(f"load per {what}", fontsize=10)
    axes.set_xlabel(what)
    axes.set_xticks(_ticks(values.shape[1], 8 if what == "expert actor" else 16))
    rows = _ticks(len(layers), 32)
    axes.set_yticks(rows, [str(layers[row]) for row in rows] if labelled else [""] * len(rows))
    if labelled:
        axes.set_ylabel("MoE layer")
    axes.tick_params(labelsize=8)
    figure = axes.get_figure(root=True)
    assert figure is not None
    size = min(1.0, 5.0 / figure.get_figheight())
    bar = figure.colorbar(
        image, ax=axes, extend="max", extendfrac=0.03, pad=0.015, aspect=30, shrink=size,
        anchor=(0.0, 1.0), format="%g",
    )  # fmt: skip
    bar.set_ticks(scale)
    bar.ax.tick_params(labelsize=7)
    if values.shape[1] <= NUMBERED_RANKS and len(layers) <= NUMBERED_LAYERS:
        _write_numbers(axes, values)


def _write_numbers(axes: Axes, values: np.ndarray) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if value > 1.7 or value < 0.3 else "black"
            axes.text(
                column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour
            )


def _mark_dead(axes: Axes, report: Report) -> None:
    """A cross on every expert in alarm."""
    dead = [(x, y) for y, one in enumerate(report.layers) for x in one.dead]
    if dead:
        x, y = zip(*dead, strict=True)
        axes.scatter(x, y, marker="x", s=18, linewidths=1.2, color="black")
        axes.set_title("load per expert (x: dead)", fontsize=10)


def _ticks(size: int, most: int) -> list[int]:
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128, 256, size) if size / s <= most)
    return list(range(0, size, step))


def _title(report: Report) -> str:
    parts = [report.model] if report.model else []
    parts.append(f"{len(report.layers)} layers x {report.experts} experts, top {report.top_k}")
    if report.imbalances:
        worst, mean = max(report.imbalances), float(np.mean(report.imbalances))
        parts.append(f"max/mean of actors: worst {worst:.2f}, mean {mean:.2f}")
    if report.fan_out is not None:
        parts.append(f"{report.fan_out:.2f} actors per token")
    return "   |   ".join(parts) + "\n1 = an even share"
