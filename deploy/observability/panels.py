"""What a dashboard consists of. `grafana.py` writes it as JSON."""

from dataclasses import dataclass
from typing import Literal

View = Literal["timeseries", "stat", "table"]
# Grafana's names of units.
Unit = Literal[
    "short", "none", "s", "bytes", "percentunit", "reqps", "ops", "Bps", "suffix: tok/s", "bool",
    "dateTimeFromNow",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One query. legend: with {{label}} in it; unset: one series needs none."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """width: of 24 columns. thresholds: (from this value on, colour), ascending.

    may_be_empty: why this panel shows nothing on a healthy server under load, if so.
    """

    title: str
    description: str
    targets: tuple[Target, ...]
    unit: Unit = "short"
    view: View = "timeseries"
    width: int = 8
    stacked: bool = False
    maximum: float | None = None
    thresholds: tuple[tuple[float, str], ...] = ()
    may_be_empty: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A template variable filled from a query; all values by default."""

    name: str
    label: str
    query: str


@dataclass(frozen=True, slots=True)
class Board:
    """uid: stable, also the file's name. marks: queries whose results are drawn as vertical lines,
    by name."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...]
    marks: tuple[tuple[str, str], ...] = ()

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)
