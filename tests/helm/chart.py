"""Renders the chart and finds what is in it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.helm_tool import run_helm

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "expertmesh"
PRESETS = sorted((CHART / "ci").glob("*-values.yaml"))
GROUPS = ("head", "front-door", "attention", "experts")

Objects = list[dict[str, Any]]


class Refused(AssertionError):
    """helm does not render these values. Says why."""


def render(
    preset: Path | None = None,
    *,
    release: str = "mesh",
    api_versions: tuple[str, ...] = (),
    **values: Any,
) -> Objects:
    """All objects of the chart. values: by key (dotted if nested), what replaces the preset's.
    Raises Refused."""
    files = [] if preset is None else ["-f", preset]
    changed = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    versions = [f"--api-versions={version}" for version in api_versions]
    done = run_helm("template", release, CHART, "--namespace=llm", *files, *changed, *versions)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return [found for found in yaml.load_all(done.stdout, yaml.CSafeLoader) if found]


def the(objects: Objects, kind: str, suffix: str = "") -> dict[str, Any]:
    """The one object of that kind whose name ends so."""
    (found,) = [
        thing
        for thing in objects
        if thing["kind"] == kind and thing["metadata"]["name"].endswith(suffix)
    ]
    return found


def kinds(objects: Objects) -> list[str]:
    return [thing["kind"] for thing in objects]


def service(objects: Objects) -> dict[str, Any]:
    """The spec of the RayService."""
    spec: dict[str, Any] = the(objects, "RayService")["spec"]
    return spec


def serve_config(objects: Objects) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(service(objects)["serveConfigV2"])
    return config


def app_arguments(objects: Objects) -> dict[str, Any]:
    """What build_openai_app gets."""
    (application,) = serve_config(objects)["applications"]
    arguments: dict[str, Any] = application["args"]
    return arguments


def groups(objects: Objects) -> dict[str, dict[str, Any]]:
    """Group specs by name, the head's as "head"."""
    cluster = service(objects)["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"]} | workers


def pods(objects: Objects) -> Iterator[tuple[str, dict[str, Any]]]:
    """(group, pod template) of Ray's pods."""
    for name, group in groups(objects).items():
        yield name, group["template"]


def pod(objects: Objects, group: str) -> dict[str, Any]:
    """A group's pod spec."""
    spec: dict[str, Any] = groups(objects)[group]["template"]["spec"]
    return spec


def container(objects: Objects, group: str) -> dict[str, Any]:
    """Ray's container of a group."""
    first: dict[str, Any] = pod(objects, group)["containers"][0]
    return first


def offers(group: dict[str, Any]) -> dict[str, int]:
    """The custom Ray resources of a group's pods."""
    quoted: str = group["rayStartParams"]["resources"]
    assert quoted[0] == quoted[-1] == "'"
    resources: dict[str, int] = json.loads(quoted[1:-1])
    return resources
