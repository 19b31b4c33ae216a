"""Monitors, rules and dashboards: up to date with the metrics, and taken by Prometheus."""

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

from helm import generate
from tests.helm.chart import CHART, PRESETS, container, groups, kinds, render, the
from tests.support.tools import require_tool

H200 = next(path for path in PRESETS if "h200" in path.name)
B200 = next(path for path in PRESETS if "b200" in path.name)


def test_the_readmes_table_and_the_copies_are_up_to_date() -> None:
    assert generate.main(["--check"]) == 0, "run python helm/generate.py"


def test_every_value_is_documented_and_has_a_schema() -> None:
    source = (CHART / "values.yaml").read_text()
    told = {value.path for value in generate.documented(source)}
    whole = {"podSecurityContext", "securityContext", "networkPolicy.operator"}
    schema = json.loads((CHART / "values.schema.json").read_text())

    def visit(values: dict[str, Any], part: dict[str, Any], path: str = "") -> None:
        for key, value in values.items():
            name = path + key
            assert key in part["properties"], f"{name} has no schema"
            inner = part["properties"][key]
            nested = isinstance(value, dict) and "properties" in inner
            if name in told or name in whole or not nested:
                assert name in told, f"{name} has no comment"
            else:
                assert inner["additionalProperties"] is False, name
                visit(value, inner, f"{name}.")

    visit(yaml.safe_load(source), schema)


def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    promtool = require_tool("promtool")
    for preset in (H200, B200):
        groups = the(render(preset), "PrometheusRule")["spec"]["groups"]
        file = tmp_path / "rules.yaml"
        file.write_text(yaml.safe_dump({"groups": groups}))
        done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert groups[-1]["name"] == "site"


def test_rules_keep_prometheus_own_templates() -> None:
    file = yaml.safe_load((CHART / "files" / "expertmesh-rules.yaml").read_text())
    assert the(render(H200), "PrometheusRule")["spec"]["groups"] == file["groups"]
    assert "{{ $labels." in json.dumps(file)


def test_dashboards_are_the_generated_ones() -> None:
    found = the(render(H200), "ConfigMap", "-dashboards")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert found["metadata"]["annotations"] == {"grafana_folder": "ExpertMesh"}
    for name, text in found["data"].items():
        assert json.loads(text) == json.loads((CHART / "files" / name).read_text())
        assert json.loads(text)["uid"] == name.removesuffix(".json")
    assert len(found["data"]) == 2


def test_monitors_select_what_listens() -> None:
    objects = render(H200)
    service = the(objects, "Service", "mesh-expertmesh")
    monitor = the(objects, "ServiceMonitor")["spec"]
    labels = service["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    # The gRPC Service has other labels, so nothing is scraped twice.
    grpc = the(objects, "Service", "-grpc")["metadata"]["labels"]
    assert not monitor["selector"]["matchLabels"].items() <= grpc.items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert endpoint["authorization"]["credentials"]["name"] == "expertmesh-scrape"
    (ray,) = the(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    for name, group in groups(objects).items():
        ports = {port["name"]: port for port in container(objects, name)["ports"]}
        exported = group["rayStartParams"]["metrics-export-port"]
        assert ports[ray["port"]]["containerPort"] == int(exported)


def test_nothing_of_the_prometheus_operator_by_default() -> None:
    assert not {"ServiceMonitor", "PodMonitor", "PrometheusRule"} & {*kinds(render())}
