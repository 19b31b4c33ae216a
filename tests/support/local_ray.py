"""A Ray cluster for one test module: import `cluster` there and it is used by every test."""

import os
from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_worker_niceness", "0")
    address = os.environ.get("EXPERTMESH_TEST_RAY")  # one that runs already, to save its start
    if address:
        ray.init(address=address, log_to_driver=False)
    else:
        # "local": never a cluster that happens to run on this machine.
        ray.init(
            address="local", num_cpus=16, object_store_memory=128 << 20, include_dashboard=False
        )
    yield
    ray.shutdown()
