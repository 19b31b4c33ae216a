"""A Ray cluster for one test module: import `cluster` there and it is used by every test."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = os.environ.get("EXPERTMESH_TEST_RAY")  # one that runs already, to save its start
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        start_local()
    yield
    ray.shutdown()


def start_local(**more: Any) -> None:
    """A cluster of this process: never one that happens to run on this machine.

    Ray gives its own daemon 30 s to come up; a machine that is busy with other tests may take
    longer once.
    """
    wanted = {"num_cpus": 16, "object_store_memory": 128 << 20, "include_dashboard": False} | more
    try:
        ray.init(address="local", **wanted)
    except Exception as error:
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(address="local", **wanted)
