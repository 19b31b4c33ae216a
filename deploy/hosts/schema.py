"""A cluster file against Ray's schema, with the key in every message."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft7Validator, ValidationError

from expertmesh.deploy.hosts.findings import Finding

# Keys of old examples that are still around.
OUTDATED = {
    "min_workers": "is a key of each node type now (available_node_types.TYPE.min_workers); "
    "hosts of the local provider are all started",
    "initial_workers": "is gone: min_workers of a node type is what is started",
    "autoscaling_mode": "is gone: see upscaling_speed",
    "target_utilization_fraction": "is gone: see upscaling_speed",
    "head_node": "is available_node_types.TYPE.node_config of the head_node_type now",
    "worker_nodes": "is available_node_types.TYPE.node_config now",
    "worker_default_node_type": "is gone",
}


def check_schema(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in config.keys() & OUTDATED.keys():
        yield Finding(key, OUTDATED[key])
    known = {key: value for key, value in config.items() if key not in OUTDATED}
    for error in sorted(Draft7Validator(_schema()).iter_errors(known), key=lambda e: str(e.path)):
        yield from _findings(error)


def _findings(error: ValidationError) -> Iterator[Finding]:
    where = dotted([str(part) for part in error.absolute_path])
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        yield Finding(_join(where, missing), "is missing")
    elif error.validator == "additionalProperties":
        for key in error.instance.keys() - error.schema.get("properties", {}).keys():
            yield Finding(_join(where, key), "is no key that Ray knows")
    else:
        yield Finding(where or "(the file)", error.message)


def dotted(parts: list[str]) -> str:
    return ".".join(parts)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _schema() -> dict[str, Any]:
    import ray.autoscaler

    file = Path(ray.autoscaler.__file__).parent / "ray-schema.json"
    schema: dict[str, Any] = json.loads(file.read_text())
    return schema
