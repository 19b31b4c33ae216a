"""Runs `build_openai_app` on a local Ray behind Serve's own proxy, until told to stop.

usage: python -m tests.support.serve_app_driver MODEL PORT; prints "up", stops at end of input.
"""

import sys

import ray
from ray import serve

from expertmesh.deploy.serve_app import build_openai_app


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    ray.init(
        address="local",
        num_cpus=6,
        object_store_memory=128 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": 90})
    mesh = {
        "load": {"model": model},
        "expert_actors": 1,
        "engine": {"pages": 32, "slots": 4},
        "name": "proxied",
    }
    serve.run(build_openai_app({"mesh": mesh, "served_model_name": "tiny"}), name="expertmesh")
    print("up", flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
