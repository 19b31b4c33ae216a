"""The policy that Ray Serve calls, driven by Serve's own wrapper and context; the seats' wish."""

import asyncio
import itertools
import logging
import math
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from expertmesh.cluster.autoscaling.settings import AttentionScaling
from expertmesh.cluster.directory import ScaleError
from expertmesh.deploy.serve_scaling import ASK_AGAIN_S, AttentionPolicy, Wish, seats_application

SCALING = AttentionScaling(max_replicas=6, up_delay_s=3, down_delay_s=60)


def serve_config(settings: AttentionScaling = SCALING, dry_run: bool = False) -> AutoscalingConfig:
    """As Serve's controller gets it: through the application and back from pickle and JSON."""
    app = seats_application("m-mesh", "ns", 2, settings, dry_run=dry_run)
    config = app._bound_deployment._deployment_config.autoscaling_config
    assert isinstance(config, AutoscalingConfig)
    return config


class ServeController:
    """Calls the policy as Serve does, once a second, and does what it says."""

    def __init__(self, config: AutoscalingConfig, seats: int) -> None:
        self.config, self.seats, self.state = config, seats, {}
        self.now, self.up, self.down = 1e9, None, None
        # The controller has no `expertmesh` source of the policy, only its pickle.
        self.policy = _apply_autoscaling_config(_resolve_policy_callable(config.policy))

    def context(self, metrics: dict[str, list[float]], **changes: Any) -> AutoscalingContext:
        deployment = DeploymentID("attention", "app")
        ids = [ReplicaID(f"r{i}", deployment) for i in range(self.seats)]
        values: dict[str, Any] = {
            "deployment_id": deployment,
            "deployment_name": "attention",
            "app_name": "app",
            "current_num_replicas": self.seats,
            "target_num_replicas": self.seats,
            "running_replicas": ids,
            "total_num_requests": 0.0,
            "total_queued_requests": 0.0,
            "aggregated_metrics": lambda: {
                name: dict(zip(ids, column, strict=False)) for name, column in metrics.items()
            },
            "raw_metrics": None,
            "capacity_adjusted_min_replicas": self.config.min_replicas,
            "capacity_adjusted_max_replicas": self.config.max_replicas,
            "policy_state": self.state,
            "last_scale_up_time": self.up,
            "last_scale_down_time": self.down,
            "current_time": self.now,
            "config": self.config,
        }
        return AutoscalingContext(**(values | changes))

    def run(
        self, seconds: int, kv_load: float, monkeypatch: pytest.MonkeyPatch, answers: float = 1.0
    ) -> list[int]:
        """kv_load: in units of one replica's memory."""
        history = []
        for _ in range(seconds):
            monkeypatch.setattr("time.time", lambda: self.now)
            n = self.seats
            metrics = {
                "answers": [answers] * n,
                "occupancy": [min(1.0, kv_load / n)] * n,
                "queued_tokens": [0.0] * n,
            }
            wanted, self.state = self.policy(self.context(metrics))
            wanted = max(self.config.min_replicas, min(self.config.max_replicas, wanted))
            if wanted > n:
                self.up = self.now
            elif wanted < n:
                self.down = self.now
            self.seats = wanted
            history.append(wanted)
            self.now += 1.0
        return history


def test_bounds_delays_and_settings_reach_serve() -> None:
    config = serve_config()
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (1, 2, 6)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (3, 60)
    policy = _resolve_policy_callable(config.policy)
    assert policy._settings == SCALING


def test_full_replicas_get_company_after_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ServeController(serve_config(), 1)
    history = controller.run(60, 1.9, monkeypatch)
    assert history[:3] == [1, 1, 1]  # nothing before the delay
    assert 1.9 / history[-1] <= SCALING.high_occupancy
    assert history == sorted(history)
    assert max(b - a for a, b in itertools.pairwise(history)) <= SCALING.max_step_up


def test_idle_replicas_leave_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ServeController(serve_config(), 4)
    history = controller.run(400, 0.0, monkeypatch)
    assert history[int(SCALING.down_delay_s) - 1] == 4
    assert history[-1] == 1
    changes = [i for i in range(1, 400) if history[i] != history[i - 1]]
    assert [history[i - 1] - history[i] for i in changes] == [1, 1, 1]
    gaps = [b - a for a, b in itertools.pairwise(changes)]
    assert min(gaps) >= SCALING.down_cooldown_s


def test_silent_replicas_keep_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ServeController(serve_config(), 4)
    assert set(controller.run(300, 0.0, monkeypatch, answers=0.9)) == {4}
    assert set(controller.run(60, 4.0, monkeypatch, answers=0.0)) == {4}


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"answers": [1.0, 1.0], "occupancy": [0.0, 0.0], "queued_tokens": [0.0]},
        {"answers": [1.0], "occupancy": [0.0, 0.0], "queued_tokens": [0.0, 0.0]},
        {"answers": [1.0, 1.0], "occupancy": [0.0, math.nan], "queued_tokens": [0.0, 0.0]},
    ],
)
def test_a_seat_without_numbers_decides_nothing(metrics: dict[str, list[float]]) -> None:
    controller = ServeController(serve_config(), 2)
    policy = AttentionPolicy(SCALING.model_dump())
    assert policy(controller.context(metrics)) == (2, {})


def test_nothing_new_is_asked_while_seats_come_or_go() -> None:
    controller = ServeController(serve_config(), 2)
    full = {"answers": [1.0] * 2, "occupancy": [1.0] * 2, "queued_tokens": [0.0] * 2}
    context = controller.context(full, target_num_replicas=3)
    assert AttentionPolicy(SCALING.model_dump())(context) == (3, {})


def test_queued_tokens_count_per_replica() -> None:
    controller = ServeController(serve_config(), 2)
    policy = AttentionPolicy(SCALING.model_dump())
    for queued, wanted in ((SCALING.high_queued_tokens, 2), (2 * SCALING.high_queued_tokens, 3)):
        metrics = {
            "answers": [1.0] * 2,
            "occupancy": [0.5] * 2,
            "queued_tokens": [float(queued), 1.0],
        }
        assert policy(controller.context(metrics))[0] == wanted


def test_a_dry_run_only_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    listener = logging.Handler(logging.INFO)
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    controller = ServeController(serve_config(dry_run=True), 1)
    logging.getLogger("ray.serve").addHandler(listener)
    try:
        assert set(controller.run(30, 1.9, monkeypatch)) == {1}
    finally:
        logging.getLogger("ray.serve").removeHandler(listener)
    assert said == ["attention seats: dry run, would go from 1 to 2: occupancy 1.00 > 0.8"]


class FakeMesh:
    def __init__(self, desired: int, refuses: bool = False) -> None:
        self.desired, self.refuses, self.asked = desired, refuses, []

    async def status(self) -> dict[str, Any]:
        return {"desired": {"attention": self.desired, "experts": 2}, "attention": []}

    async def scale(self, experts: None, attention: int, dry_run: bool) -> dict[str, Any]:
        self.asked.append((experts, attention, dry_run))
        if self.refuses:
            raise ScaleError("no", "attention")
        self.desired = attention
        return {}


def test_the_mesh_is_told_the_number_of_seats_when_it_differs() -> None:
    mesh = FakeMesh(desired=1)
    wish = Wish(mesh)

    async def told() -> None:
        for second, seats in enumerate([1, 3, 3, 2, 0]):
            await wish.tell(seats, float(second))

    asyncio.run(told())
    assert mesh.asked == [(None, 3, False), (None, 2, False)]


@pytest.mark.parametrize("refuses", [True, False])
def test_a_wish_that_did_not_come_true_is_repeated_but_not_at_once(refuses: bool) -> None:
    mesh = FakeMesh(desired=1, refuses=refuses)
    wish = Wish(mesh)

    async def told() -> None:
        for second in range(int(ASK_AGAIN_S) + 1):
            await wish.tell(2, float(second))
            mesh.desired = 1  # the replica could not be added

    asyncio.run(told())
    assert len(mesh.asked) == 2
