"""Strict validation of objects: Kubernetes' own schemas, and KubeRay's CRD.

crds/rayservice-v1.json is the `openAPIV3Schema` of version v1 in KubeRay's CRD of RayService.
"""

import functools
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft7Validator

KUBERNETES = "1.31"
_CRDS = Path(__file__).parent / "crds"
# Without published schemas at hand: the Prometheus operator's, and Google's.
_OPERATORS = {
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "cloud.google.com/v1": ("BackendConfig",),
}


def check(thing: dict[str, Any]) -> None:
    """Raises AssertionError with every path that is wrong; unknown fields are."""
    if thing["kind"] in _OPERATORS.get(thing["apiVersion"], ()):
        return
    if thing["apiVersion"].startswith("ray.io/"):
        errors = [
            f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
            for error in ray_service().iter_errors(thing)
        ]
        assert not errors, "\n".join(errors)
        return
    try:
        kubernetes_validate.validate(thing, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise AssertionError(f"{thing['kind']}: {error}") from error


def check_pod(template: dict[str, Any]) -> None:
    """A pod template against the full schema of a pod, which CRDs abridge."""
    metadata = {"name": "pod", **template["metadata"]}
    check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


@functools.cache
def ray_service() -> Draft7Validator:
    schema = _strict(json.loads((_CRDS / "rayservice-v1.json").read_text()))
    schema["properties"] |= {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object"},
    }
    return Draft7Validator(schema)


def _strict(schema: Any) -> Any:
    """A structural schema as draft 7 that refuses unknown fields, as the API server does."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    literal = ("enum", "default", "required", "x-kubernetes-validations")
    made = {k: v if k in literal or k == "properties" else _strict(v) for k, v in schema.items()}
    if "properties" in made:
        made["properties"] = {name: _strict(part) for name, part in made["properties"].items()}
        if not made.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("anyOf", None)
        made["type"] = ["integer", "string"]
    return made
