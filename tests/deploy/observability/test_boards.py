"""The committed dashboards and rules: fresh, well-formed, and about metrics that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertmesh.cluster import metrics
from expertmesh.deploy.observability import generate
from expertmesh.deploy.observability.__main__ import main
from expertmesh.deploy.observability.promql import Query
from tests.support.promql import expressions, filled, grouped_by, references
from tests.support.promtool import check_rules, run_rule_tests

BOARDS = [f"{board.uid}.json" for board in generate.BOARDS]
RULES = "expertmesh-rules.yaml"
LABELS = {
    name: {*metric.labels, "le"} for metric in (*metrics.ALL, *metrics.PROCESS)
    for name in metric.exposed
}  # fmt: skip
# What Prometheus adds to every scraped series.
SCRAPED = {"job", "instance", "namespace"}


def load(name: str) -> Any:
    return json.loads((generate.FOLDER / name).read_text())


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((generate.FOLDER / RULES).read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def all_expressions() -> list[str]:
    found = [expr for name in BOARDS for expr in expressions(load(name))]
    return found + [rule["expr"] for rule in rules()]


def test_the_committed_files_are_what_the_definitions_say() -> None:
    assert generate.stale() == [], "run: python -m expertmesh.deploy.observability --write"


def test_check_notices_and_write_mends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(generate.write(tmp_path)) == len(generate.files())
    assert generate.stale(tmp_path) == [] and generate.write(tmp_path) == []
    (tmp_path / BOARDS[0]).write_text("{}")
    (tmp_path / RULES).unlink()
    (tmp_path / "old.json").write_text("{}")
    wrong = sorted([BOARDS[0], RULES, "old.json"])
    assert generate.stale(tmp_path) == wrong
    monkeypatch.setattr(generate.write, "__defaults__", (tmp_path,))
    monkeypatch.setattr(generate.stale, "__defaults__", (tmp_path,))
    assert main(["--check"]) == 1 and "old.json is stale" in capsys.readouterr().err
    assert main(["--write"]) == 0 and main(["--check"]) == 0


def test_every_query_is_about_metrics_and_labels_that_exist() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    everything = set().union(*LABELS.values()) | SCRAPED
    for expr in all_expressions():
        found = references(expr)
        assert found, expr
        for name, labels in found:
            assert name in LABELS or name in recorded, f"{name} in {expr}"
            assert set(labels) <= LABELS.get(name, {"model_name"}) | SCRAPED, expr
        assert grouped_by(expr) <= everything, expr


def test_every_metric_is_on_a_dashboard_or_in_a_rule() -> None:
    used = {name for expr in all_expressions() for name, _ in references(expr)}
    unused = {
        metric.full_name for metric in metrics.ALL if not used.intersection(metric.exposed)
    } - {metrics.AUTH_KEYS.full_name}
    assert unused == set()


@pytest.mark.parametrize("value", ["", ".*", "nano"])
def test_every_query_parses_whatever_the_variables_are(value: str) -> None:
    asked = [{"record": f"x:y{i}", "expr": filled(expr, value)}
             for i, expr in enumerate(all_expressions())]  # fmt: skip
    assert not any("$" in one["expr"] for one in asked)
    check_rules(yaml.safe_dump({"groups": [{"name": "parsed", "rules": asked}]}))


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_can_be_provisioned_anywhere(name: str) -> None:
    board = load(name)
    assert board["id"] is None and f"{board['uid']}.json" == name
    assert re.fullmatch(r"[a-z-]{1,40}", board["uid"]), "Grafana takes up to 40 characters"
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    used = {v for expr in expressions(board) for v in re.findall(r"\$(\w+)", expr)}
    assert used <= variables.keys() | {"__rate_interval"}
    assert used >= variables.keys() - {"datasource"}, "a variable that nothing reads"
    assert {"model_name"} < variables.keys()
    text = json.dumps(board)
    sources = set(re.findall(r'"uid": "([^"]*)"', text)) - {board["uid"]}
    assert sources == {"${datasource}"}


@pytest.mark.parametrize("name", BOARDS)
def test_panels_are_described_measured_and_laid_out(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    ids, titles = [], []
    for panel in load(name)["panels"]:
        ids.append(panel["id"])
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] == "row":
            continue
        titles.append(panel["title"])
        assert panel["description"].endswith(".") and panel["targets"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert "rate(" not in target["expr"] or "$__rate_interval" in target["expr"]
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= grouped_by(target["expr"]), target["legendFormat"]
            if "histogram_quantile" in target["expr"]:
                assert re.search(r"by \(le[,)]", target["expr"])
    assert len(ids) == len(set(ids)) and len(titles) == len(set(titles))


def test_what_every_front_door_tells_is_counted_once() -> None:
    for name in BOARDS:
        for panel in load(name)["panels"]:
            for target in panel.get("targets", []):
                expr = target["expr"]
                for metric in metrics.SHARED:
                    for exposed in metric.exposed:
                        if f"{exposed}{{" in expr and "sum" in expr:
                            assert f"max by (job, namespace, {', '.join(metric.labels)}" in expr


def test_doors_do_not_multiply_the_traffic_and_servers_do() -> None:
    """Two servers of one model, of three front doors each: 600 and 60 tokens a minute."""
    name = metrics.ENGINE_GENERATION_TOKENS.exposed[0]
    series = [
        {
            "series": f'{name}{{job="{job}",instance="{door}",model_name="m",engine="0"}}',
            "values": f"0+{pace}x60",
        }
        for job, pace in (("a", 600), ("b", 60))
        for door in "123"
    ]
    expr = filled(f"sum({Query('5m', True).rate(metrics.ENGINE_GENERATION_TOKENS)})", ".*")
    expected = [{"expr": expr, "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": 11}]}]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    run_rule_tests({"doors.test": yaml.safe_dump({"rule_files": [], "tests": [test]})}, {})


def test_a_query_can_not_be_made_of_what_is_not_there() -> None:
    query = Query("5m", variables=True)
    assert query.select(metrics.ENGINE_UP) == (
        'expertmesh_engine_up{model_name=~"$model_name",engine=~"$engine"}'
    )
    with pytest.raises(AssertionError):
        query.select(metrics.ENGINE_UP, seat="=x")
    with pytest.raises(AssertionError):
        query.select(metrics.ENGINE_UP, "bucket")


def test_the_metrics_page_names_everything() -> None:
    page = (generate.FOLDER / "metrics.md").read_text()
    for metric in metrics.ALL:
        assert f"`{metric.full_name}" in page
    assert "`host` and `disk`" in page, "which values the label of tiers has"
