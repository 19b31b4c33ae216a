"""Recording and alerting rules, and the file Prometheus reads them from."""

from dataclasses import dataclass
from typing import Any, Literal

import yaml

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Record:
    """name: level:metric:operations, as Prometheus wants it."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True)
class Alert:
    """holds: how long the expression must have been true. summary, description: may use
    {{ $labels.x }} and {{ $value }}."""

    name: str
    expr: str
    severity: Severity
    summary: str
    description: str
    holds: str = "0m"


@dataclass(frozen=True, slots=True)
class Group:
    name: str
    rules: tuple[Record | Alert, ...]

    @property
    def alerts(self) -> tuple[Alert, ...]:
        return tuple(rule for rule in self.rules if isinstance(rule, Alert))


def as_yaml(groups: tuple[Group, ...]) -> str:
    document = {
        "groups": [
            {"name": group.name, "rules": [_rule(rule) for rule in group.rules]} for group in groups
        ]
    }
    return yaml.safe_dump(document, sort_keys=False, width=100, allow_unicode=True)


def _rule(rule: Record | Alert) -> dict[str, Any]:
    if isinstance(rule, Record):
        return {"record": rule.name, "expr": rule.expr}
    texts = {"summary": rule.summary, "description": rule.description}
    return {
        "alert": rule.name,
        "expr": rule.expr,
        "for": rule.holds,
        "labels": {"severity": rule.severity},
        "annotations": {name: text for name, text in texts.items() if text},
    }
