"""Runs the Serve config that ships, as `serve run` does, on a local Ray until told to stop.

usage: python -m tests.support.serve_app_driver MODEL PORT; stops at end of input.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.serve.scripts import cli

SHIPPED = Path(__file__).resolve().parents[2] / "deploy/ray/serve.yaml"


def filled_in(model: str, port: int) -> dict[str, Any]:
    """For one small machine, which offers no GPU and no custom resources but the head's."""
    config: dict[str, Any] = yaml.safe_load(SHIPPED.read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] |= {"served_model_name": "tiny", "front_doors": 1}
    mesh = application["args"]["mesh"]
    mesh |= {"attention_replicas": 1, "expert_actors": 1, "gpus_per_actor": 0, "name": "proxied"}
    mesh["load"]["model"] = model
    mesh["engine"] = {"pages": 32, "slots": 4}
    mesh["resources"] |= {"attention": {}, "experts": {}}
    return config


def main() -> None:
    ray.init(
        address="local",
        num_cpus=6,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(filled_in(sys.argv[1], int(sys.argv[2])), file)
        file.flush()
        cli(["run", "--non-blocking", file.name], standalone_mode=False)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
