"""A routing report as tables for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from expertmesh.cluster.ledger.report import LayerReport, Report

# A table longer than this is cut to the layers that need looking at, the most uneven first.
SHOWN_ROWS = 24
SHOWN_PAIRS = 10
NAMED_EXPERTS = 6


def print_report(report: Report, console: Console, all_layers: bool = False) -> None:
    console.print(_summary(report), markup=False, highlight=False)
    layers: Sequence[LayerReport] = report.layers
    if len(layers) > SHOWN_ROWS and not all_layers:
        worst = sorted(layers, key=_trouble, reverse=True)[:SHOWN_ROWS]
        layers = sorted(worst, key=lambda one: one.layer)
        console.print(
            f"{len(layers)} of {len(report.layers)} layers, the most uneven; --all shows every one"
        )
    console.print(_layer_table(layers))
    if report.actors:
        console.print(_actor_table(report, all_layers))
    if any(one.pairs for one in report.layers):
        console.print(_pair_table(report.layers))


def _trouble(one: LayerReport) -> tuple[int, float, float]:
    return len(one.dead) + len(one.unhit), one.imbalance or 0.0, one.gini or 0.0


def _summary(report: Report) -> str:
    name = f"{report.model}: " if report.model else ""
    lines = [
        f"{name}{len(report.layers)} MoE layers x {report.experts} experts, top {report.top_k}"
    ]
    if report.windows:
        lines[0] += f"; {report.windows} windows, half-life {report.half_life:g} windows"
    hits = report.layers[0].hits if report.layers else 0.0
    lines.append(f"{hits / report.top_k:,.0f} tokens remembered")
    if imbalances := report.imbalances:
        mean = sum(imbalances) / len(imbalances)
        lines.append(
            f"imbalance of the expert actors (max/mean): worst layer {max(imbalances):.3f}, "
            f"mean {mean:.3f}"
        )
    if report.fan_out is not None:
        lines.append(f"distinct expert actors per token and layer: {report.fan_out:.2f}")
    if holding := {kind: count for kind, count in report.alarms.items() if count}:
        told = ", ".join(f"{kind} {count}" for kind, count in holding.items())
        lines.append(f"alarms: {told}")
    return "\n".join(lines)


def _layer_table(layers: Sequence[LayerReport]) -> Table:
    table = Table("layer", "hits", "max/mean", "Gini", "entropy", "dead", "never hit")
    for column in table.columns[:5]:
        column.justify = "right"
    for one in layers:
        table.add_row(
            str(one.layer),
            f"{one.hits:,.0f}",
            _number(one.imbalance),
            _number(one.gini),
            _number(one.entropy),
            _named(one.dead),
            _named(one.unhit),
            style="red" if one.dead else None,
        )
    return table


def _actor_table(report: Report, every: bool) -> Table:
    """The busiest first where there are many."""
    total = sum(actor.rows for actor in report.actors)
    table = Table("actor", "rows since its start", "share", "busy")
    for column in table.columns[1:]:
        column.justify = "right"
    actors = report.actors
    if len(actors) > SHOWN_ROWS and not every:
        actors = sorted(actors, key=lambda actor: -actor.rows)[:SHOWN_ROWS]
        table.caption = f"the busiest of {len(report.actors)}"
    for actor in actors:
        share = f"{actor.rows / total:.1%}" if total else "-"
        table.add_row(actor.seat, f"{actor.rows:,.0f}", share, f"{actor.busy_share:.0%}")
    return table


def _pair_table(layers: Sequence[LayerReport]) -> Table:
    """The pairs of all layers with the most tokens beyond chance."""
    found = [(one.layer, pair) for one in layers for pair in one.pairs]
    found.sort(key=lambda item: item[1].tokens * (1 - 1 / item[1].lift), reverse=True)
    table = Table("layer", "experts together", "tokens", "x chance")
    for column in table.columns[2:]:
        column.justify = "right"
    for layer, pair in found[:SHOWN_PAIRS]:
        table.add_row(
            str(layer), f"{pair.first} + {pair.second}", f"{pair.tokens:,}", f"{pair.lift:.2f}"
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _named(experts: Sequence[int]) -> str:
    named = ", ".join(map(str, experts[:NAMED_EXPERTS]))
    more = len(experts) - NAMED_EXPERTS
    return f"{named} and {more} more" if more > 0 else named
