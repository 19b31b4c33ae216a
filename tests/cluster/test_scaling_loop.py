"""Counters of workers turned into the autoscaler's signals."""

from collections.abc import Iterator
from typing import Any

import pytest

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.experts.actor import ExpertStats
from expertmesh.cluster.autoscaling.settings import AutoscaleSettings
from expertmesh.cluster.scaling_loop import ScalingLoop
from expertmesh.cluster.traffic import Answers
from tests.support.fake_workers import FakeMesh


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMesh]:
    made = FakeMesh(monkeypatch)
    yield made
    made.controller.stop()


def answers(mesh: FakeMesh, wall: float, busy: list[float], combine: float = 0.0) -> Answers:
    engine = EngineStats(
        pages_total=10, pages_free=4, slots_total=4, slots_free=3, waiting_tokens=50,
        forward_seconds=wall,
    )  # fmt: skip
    replica = ReplicaStats(engine=engine, combine_seconds=combine)
    return Answers(
        dict.fromkeys(mesh.mesh.attention, replica),
        {
            worker: ExpertStats(busy_seconds={1: seconds}, wall_seconds=wall)
            for worker, seconds in zip(mesh.mesh.ranks.workers, busy, strict=True)
        },
    )


def loop_of(mesh: FakeMesh) -> Any:
    traffic: Any = None
    return ScalingLoop(AutoscaleSettings(), mesh.controller, traffic)


def test_shares_are_of_the_time_between_two_readings(mesh: FakeMesh) -> None:
    scaling = loop_of(mesh)
    first = answers(mesh, 100.0, [10.0, 10.0, 10.0], 5.0)
    assert scaling.read(first).experts is None  # no time has passed yet
    scaling._before = first
    signals = scaling.read(answers(mesh, 110.0, [12.0, 12.0, 15.0], 9.0))
    assert signals.experts is not None and signals.attention is not None
    assert signals.experts.busy_share == pytest.approx(0.3)
    assert signals.experts.imbalance == pytest.approx(5 / 3)
    assert signals.experts.wait_share == pytest.approx(0.4)
    assert (signals.experts.experts, signals.experts.slots) == (8, 4)
    assert signals.attention.occupancy == pytest.approx(0.6)
    assert signals.attention.queued_tokens == 100
    assert (signals.expert_actors, signals.attention_replicas) == (3, 2)
    assert not signals.changing


def test_silence_is_not_idleness(mesh: FakeMesh) -> None:
    scaling = loop_of(mesh)
    scaling._before = answers(mesh, 1.0, [0.0, 0.0, 0.0])
    now = answers(mesh, 2.0, [0.0, 0.0, 0.0])
    del now.experts[mesh.mesh.ranks.workers[1]]
    del now.replicas[mesh.mesh.attention[0]]
    signals = scaling.read(now)
    assert signals.experts is None and signals.attention is None


def test_a_change_under_way_is_said(mesh: FakeMesh) -> None:
    scaling = loop_of(mesh)
    mesh.controller.scale(4, None)
    mesh.settle()
    assert scaling.read(answers(mesh, 1.0, [0.0] * 3)).changing
