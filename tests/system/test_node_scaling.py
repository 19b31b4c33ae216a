"""Slots for another actor on a full cluster: Ray's autoscaler brings a node, and takes it back."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from expertmesh.cluster import ray_cluster
from tests.support.fake_nodes import autoscaled_ray, autoscaler_log
from tests.support.server_process import wait_for

# A fake node takes two seconds to come up on a quiet machine. On a busy one Ray gives its raylet
# up after a fixed 30 s, and the autoscaler tries again.
NODE_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with autoscaled_ray({"CPU": 1}, most=2, idle_s=3.0) as address:
        ray.init(address=address, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


@pytest.mark.timeout(900)
def test_a_reservation_that_finds_no_slot_brings_a_node(cluster: None) -> None:
    (head,) = nodes()
    with pytest.raises(TimeoutError, match=r"1 bundles of \{'GPU': 1\}"):
        ray_cluster.reserve([{"GPU": 1}], "PACK", 0.1)  # no node type has one, so nobody comes
    reserved: list[Any] = []
    waiting = threading.Thread(
        target=lambda: reserved.append(ray_cluster.reserve([{"CPU": 1}], "PACK", NODE_S))
    )
    waiting.start()
    waiting.join(NODE_S + 10)
    assert reserved, autoscaler_log()
    (new,) = nodes() - {head}
    table = ray.util.placement_group_table(reserved[0])
    assert list(table["bundles_to_node_id"].values()) == [new]
    ray_cluster.release(reserved[0])
    wait_for(lambda: nodes() == {head}, NODE_S, autoscaler_log)
