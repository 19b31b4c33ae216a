"""What Serve runs for a mesh: an autoscaler that sets the number of attention replicas, and a front
door that does not outlive its mesh."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from expertmesh.cluster.autoscaling.settings import AttentionScaling
from expertmesh.deploy import serve_scaling
from expertmesh.deploy.cli import BUNDLED
from expertmesh.deploy.listener import bind
from expertmesh.deploy.serve_app import DoorSettings, door_application
from expertmesh.deploy.serve_scaling import seats_application
from tests.support.fake_mesh import FakeKeeper, FakeReplica
from tests.support.http_server import free_port
from tests.support.local_ray import start_local
from tests.support.server_process import wait_for

MOST = 2
SCALING = AttentionScaling(
    max_replicas=MOST, up_delay_s=1, down_delay_s=3, up_cooldown_s=1, down_cooldown_s=1
)
LOOK_BACK_S = 3.0  # that Serve averages over
FOLLOW_S = 120.0  # this machine may be busy


@pytest.fixture(scope="module")
def keeper() -> Iterator[Any]:
    monkeypatch = pytest.MonkeyPatch()
    # How often seats report to Serve's controller; by default every 10 s.
    monkeypatch.setenv("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.5")
    start_local(num_cpus=4, namespace="seats", log_to_driver=False)
    try:
        actor = ray.remote(FakeKeeper).options(name="seats-mesh", num_cpus=0, max_concurrency=8)
        mesh = actor.remote(1)
        fakes = [
            ray.remote(FakeReplica).options(name=f"fake-{i}", num_cpus=0).remote(mesh)
            for i in range(MOST)
        ]
        serve.start(proxy_location="Disabled")
        monkeypatch.setattr(serve_scaling, "LOOK_BACK_S", LOOK_BACK_S)
        app = seats_application("seats-mesh", "seats", 1, SCALING)
        serve.run(app, name="seats", route_prefix=None)
        yield mesh
        del fakes
    finally:
        serve.shutdown()
        ray.shutdown()
        monkeypatch.undo()


@pytest.mark.timeout(700)
def test_replicas_follow_their_memory_and_silence_keeps_them(keeper: Any) -> None:
    def desired() -> int:
        return int(ray.get(keeper.state.remote())[0])

    assert desired() == 1
    ray.get(keeper.set.remote(1.9))
    wait_for(lambda: desired() == MOST, FOLLOW_S)
    # Nothing to do, but nobody says so.
    ray.get(keeper.set.remote(0.0, silent=True))
    time.sleep(LOOK_BACK_S + 2 * SCALING.down_delay_s)
    assert desired() == MOST
    ray.get(keeper.set.remote(0.0))
    wait_for(lambda: desired() == 1, FOLLOW_S)
    assert ray.get(keeper.state.remote())[1][-2:] == [2, 1]


@pytest.mark.timeout(400)
def test_a_front_door_whose_mesh_was_killed_frees_its_port(keeper: Any) -> None:
    port = free_port()
    mesh = ray.remote(FakeKeeper).options(name="killed-mesh", num_cpus=0).remote(1)
    settings = DoorSettings(
        model=BUNDLED, mesh="killed-mesh", namespace="seats", port=port, alone_seconds=2
    )
    here = ray.util.get_node_ip_address()
    serve.run(door_application(settings, here), name="killed", route_prefix=None)
    url = f"http://127.0.0.1:{port}/health"
    assert httpx.get(url, timeout=60).status_code == 200
    assert "killed" in serve.status().applications
    ray.kill(mesh)
    wait_for(lambda: "killed" not in serve.status().applications, FOLLOW_S)

    def free() -> bool:
        with contextlib.suppress(OSError):
            bind("127.0.0.1", port).close()
            return True
        return False

    wait_for(free, FOLLOW_S)
