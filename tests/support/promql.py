"""What a PromQL expression refers to, and Grafana's variables in it."""

import re
from typing import Any, NamedTuple

WORDS = {
    "sum", "min", "max", "avg", "by", "on", "group_left", "and", "or", "time", "rate", "increase",
    "changes", "deriv", "absent", "histogram_quantile", "min_over_time",
}  # fmt: skip


class Reference(NamedTuple):
    """A metric's name with the labels its selector asks for."""

    name: str
    labels: tuple[str, ...]


def references(expr: str) -> list[Reference]:
    """Every selector; one that is built of a regular expression over names gives each of them."""
    found = []
    text = re.sub(r"\b(?:by|on|group_left)\s*\([^)]*\)", " ", expr)
    for name, inner in re.findall(r"([A-Za-z_:][\w:]*)?\{([^}]*)\}", text):
        labels = tuple(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', inner)))
        named = re.search(r'__name__=~"([^"]*)"', inner)
        names = named.group(1).split("|") if named else [name]
        found += [Reference(each, tuple(x for x in labels if x != "__name__")) for each in names]
    bare = re.sub(r"\[[^\]]*\]", "", re.sub(r"[A-Za-z_:][\w:]*\{[^}]*\}|\{[^}]*\}", " ", text))
    bare = re.sub(r'"[^"]*"', "", bare)
    names = re.findall(r"(?<![\w$.])[A-Za-z_:][\w:]*", bare)
    return found + [Reference(name, ()) for name in names if name not in WORDS]


def grouped_by(expr: str) -> set[str]:
    """Labels in by (...), on (...) and group_left (...)."""
    lists = re.findall(r"\b(?:by|on|group_left)\s*\(([^)]*)\)", expr)
    return {label for one in lists for label in re.split(r"[,\s]+", one) if label}


def expressions(dashboard: Any) -> list[str]:
    """Every query of a dashboard's JSON: panels, annotations, variables."""
    if isinstance(dashboard, dict):
        found = [dashboard["expr"]] if isinstance(dashboard.get("expr"), str) else []
        if isinstance(dashboard.get("definition"), str):
            found.append(re.sub(r"^label_values\((.*),\s*\w+\)$", r"\1", dashboard["definition"]))
        return found + [expr for value in dashboard.values() for expr in expressions(value)]
    if isinstance(dashboard, list):
        return [expr for value in dashboard for expr in expressions(value)]
    return []


def filled(expr: str, value: str, interval: str = "1m") -> str:
    """With every template variable as `value`."""
    expr = expr.replace("$__rate_interval", interval)
    return re.sub(r"\$\w+|\$\{\w+\}", value, expr)
