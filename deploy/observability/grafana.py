"""Boards as Grafana's dashboard JSON (schema 39, Grafana 10 and later)."""

from collections.abc import Iterator
from typing import Any

from expertmesh.deploy.observability.panels import Board, Panel, Target, Variable

Json = dict[str, Any]

HEIGHT = {"timeseries": 8, "table": 8, "stat": 4}
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
TAG = "expertmesh"


def dashboard(board: Board) -> Json:
    """`id` is null: the uid says which dashboard it replaces."""
    return {
        "id": None,
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards", "title": "ExpertMesh", "tags": [TAG], "asDropdown": True,
                "includeVars": True, "keepTime": True,
            }
        ],
        "annotations": {"list": [_mark(name, expr) for name, expr in board.marks]},
        "templating": {"list": [_datasource(), *map(_variable, board.variables)]},
        "panels": list(_panels(board)),
    }  # fmt: skip


def _mark(name: str, expr: str) -> Json:
    return {
        "name": name, "datasource": DATASOURCE, "enable": True, "expr": expr,
        "iconColor": "orange", "step": "15s", "titleFormat": name,
    }  # fmt: skip


def _datasource() -> Json:
    return {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
        "current": {}, "hide": 0, "refresh": 1, "regex": "",
    }  # fmt: skip


def _variable(variable: Variable) -> Json:
    return {
        "name": variable.name, "label": variable.label, "type": "query", "datasource": DATASOURCE,
        "query": {"query": variable.query, "refId": variable.name}, "definition": variable.query,
        "refresh": 2, "sort": 3, "multi": True, "includeAll": True, "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]}, "hide": 0, "regex": "",
    }  # fmt: skip


def _panels(board: Board) -> Iterator[Json]:
    """Row by row, left to right; a panel that does not fit begins a new line."""
    number, y = 0, 0
    for row in board.rows:
        number += 1
        yield {
            "id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        }  # fmt: skip
        y, x, line = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": HEIGHT[panel.view]}
            yield {"id": number, "gridPos": place} | _panel(panel)
            x, line = x + panel.width, max(line, HEIGHT[panel.view])
        y += line


def _panel(panel: Panel) -> Json:
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"},
                     "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
    if panel.view == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value",
                   "graphMode": "area", "textMode": "auto"}  # fmt: skip
    elif panel.view == "table":
        options = {"showHeader": True}
    steps = [{"color": colour, "value": value if i else None}
             for i, (value, colour) in enumerate(panel.thresholds)]  # fmt: skip
    defaults: Json = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps or [{"color": "green", "value": None}]},
    }
    if panel.unit == "dateTimeFromNow":
        del defaults["min"]
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.view == "timeseries":
        defaults["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 25 if panel.stacked else 8,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
    return {
        "type": panel.view,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [_target(i, one, panel) for i, one in enumerate(panel.targets)],
    }


def _target(number: int, target: Target, panel: Panel) -> Json:
    now = panel.view == "table"
    return {
        "refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": target.expr,
        "legendFormat": target.legend or "__auto", "range": not now, "instant": now,
        "format": "table" if now else "time_series",
    }  # fmt: skip
