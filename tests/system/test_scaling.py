"""Growing, shrinking and rebalancing a real mesh under streams: nothing pauses, no bit changes."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.cluster.autoscaling.settings import AutoscaleSettings, ExpertScaling
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.launch import Mesh, start
from expertmesh.cluster.mover import PlanAbandoned
from expertmesh.cluster.settings import RebalanceSettings
from expertmesh.cluster.worker_pool import WorkerError
from tests.support.local_ray import cluster
from tests.system.test_mesh import Reader, ask, model, one_process, settings, submit

__all__ = ["cluster", "model"]  # fixtures

STILL = RebalanceSettings(period_s=0, fill_spares=False)


class Stream:
    """The same few long requests again and again, until it is told to stop."""

    def __init__(self, mesh: Mesh, requests: list[GenerateRequest]) -> None:
        self._actor, self._requests = mesh.attention[0], requests
        self.reader = Reader(self._actor, "door")
        self.asked: dict[str, str] = {}
        self.more()

    def more(self) -> None:
        round_ = len(self.asked) // len(self._requests)
        for request in self._requests:
            name = f"{request.request_id}-{round_}"
            self.asked[name] = request.request_id
            again = GenerateRequest(name, request.prompt_ids, request.params)
            assert submit(self._actor, "door", again) == [None]

    def until(self, condition: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Keeps tokens flowing until the condition holds."""
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, "not in time"
            if len(self.reader.ends) == len(self.asked):
                self.more()
            time.sleep(0.02)

    def check(self, want: dict[str, list[int]]) -> None:
        self.reader.wait(lambda r: len(r.ends) == len(self.asked), 90)
        for name, request in self.asked.items():
            assert self.reader.ends[name].finish_reason == "length", self.reader.ends[name]
            assert self.reader.tokens[name] == want[request], name


def size(mesh: Mesh) -> tuple[int, int]:
    return len(mesh.epoch.attention), len(mesh.epoch.experts)


def test_both_pools_grow_and_shrink_under_streams(model: Path) -> None:
    requests = [ask(f"r{i}", i, 60) for i in range(4)]
    want = one_process(model, 1, requests)
    mesh = start(settings(model, attention_replicas=1, expert_actors=2))
    try:
        stream = Stream(mesh, requests)
        assert mesh.scale("+1", None)["experts"] == {"from": 2, "to": 3}
        stream.until(lambda: size(mesh) == (1, 3))
        assert mesh.scale(None, 2)["attention"] == {"from": 1, "to": 2}
        stream.until(lambda: size(mesh) == (2, 3))
        mesh.scale("-1", "-1")
        stream.until(lambda: size(mesh) == (1, 2))
        assert mesh.scale("+1", None, dry_run=True)["dry_run"] is True
        stream.check(want)
        assert mesh.status()["desired"] == {"attention": 1, "experts": 2}
        assert mesh.controller.counts.losses == 0
    finally:
        mesh.stop()


def test_a_join_that_fails_is_rolled_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask("r", 1, 80)]
    want = one_process(model, 1, requests)
    mesh = start(settings(model, expert_actors=2, rebalance=STILL))
    try:
        stream = Stream(mesh, requests)

        def fail(*arguments: Any) -> None:
            raise WorkerError("no such disk")

        monkeypatch.setattr(mesh.controller._pool, "load", fail)
        mesh.scale("+1", "+1")
        # An attempt is counted before its seat is given up.
        stream.until(lambda: mesh.controller.counts.failed_joins == 2)
        stream.until(lambda: mesh.controller.desired() == {"attention": 1, "expert": 2})
        assert "no such disk" in mesh.status()["last_error"]
        assert mesh.state().state == "ready" and mesh.epoch.number == 0
        stream.check(want)
    finally:
        mesh.stop()


@pytest.mark.parametrize("dry_run", [True, False])
def test_the_autoscaler_adds_an_actor_under_load_unless_dry(model: Path, dry_run: bool) -> None:
    requests = [ask(f"r{i}", i, 60) for i in range(4)]
    want = one_process(model, 1, requests)
    eager = ExpertScaling(
        min_actors=2,
        max_actors=3,
        high_busy_share=0.02,
        low_busy_share=0.01,
        up_delay_s=0.5,
        up_cooldown_s=0.5,
        spare_actors=0,
    )
    scaling = AutoscaleSettings(experts=eager, attention=None, period_s=0.25, dry_run=dry_run)
    mesh = start(settings(model, expert_actors=2, rebalance=STILL, autoscale=scaling))
    try:
        stream = Stream(mesh, requests)
        if dry_run:
            stream.until(lambda: wanted_experts(mesh) == 3, 30)
            assert mesh.controller.desired()["expert"] == 2
        else:
            stream.until(lambda: size(mesh) == (1, 3))
        stream.check(want)
    finally:
        mesh.stop()


def wanted_experts(mesh: Mesh) -> int:
    scaling = mesh.upkeep.scaling
    assert scaling is not None
    return 0 if scaling.last is None else scaling.last.experts


def test_plans_without_end_change_no_bit_of_decode_or_chunked_prefill(model: Path) -> None:
    long = [7 * i % 300 + 1 for i in range(400)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    requests = [ask(f"r{i}", i, 60) for i in range(3)]
    requests.append(GenerateRequest("long", long, params))
    engine = EngineSettings(pages=64, slots=8, step_tokens=64)
    want = one_process(model, 1, requests)
    mesh = start(settings(model, expert_actors=3, engine=engine, rebalance=STILL))
    try:
        stream, mover = Stream(mesh, requests), mesh.upkeep.mover
        draw = np.random.default_rng(0)

        def storm() -> bool:
            ranks, epoch = mesh.controller.mesh.ranks, mesh.epoch.number
            loads = draw.lognormal(0.0, 1.5, (len(ranks.placement.held), 7))
            plan = balance(loads, ranks.placement, slots=mesh.controller.mesh.slots)
            mover.carry_out(plan, epoch, ranks.workers, mesh.controller.mesh.slots)
            return mover.moves.copies >= 40

        stream.until(storm)
        stream.check(want)
        assert mover.moves.failed == 0 and mesh.epoch.number == 0
        assert mesh.epoch.version > 10
    finally:
        mesh.stop()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_in_the_middle_of_a_plan_leaves_nothing_half_moved(
    model: Path, victim: int
) -> None:
    """The plan is given up, the mesh recovers, and the next plan is carried out."""
    requests = [ask(f"r{i}", i, 60) for i in range(3)]
    want = one_process(model, 1, requests)
    mesh = start(settings(model, expert_actors=3, rebalance=STILL))
    try:
        stream, mover = Stream(mesh, requests), mesh.upkeep.mover
        draw = np.random.default_rng(victim)

        def plan() -> None:
            ranks, slots = mesh.controller.mesh.ranks, mesh.controller.mesh.slots
            loads = draw.lognormal(0.0, 1.5, (len(ranks.placement.held), 7))
            chosen = balance(loads, ranks.placement, slots=slots)
            mover.carry_out(chosen, mesh.epoch.number, list(ranks.workers), slots)

        def strike() -> None:
            while mover.moves.copies < 3:
                time.sleep(0.001)
            os.kill(mesh.controller.mesh.ranks.workers[victim].member.pid, signal.SIGKILL)

        threading.Thread(target=strike, daemon=True).start()
        with pytest.raises(PlanAbandoned):
            stream.until(lambda: plan() is not None)
        stream.until(lambda: mesh.controller.counts.joins == 1 and size(mesh) == (1, 3))
        copies = mover.moves.copies
        stream.until(lambda: plan() is None and mover.moves.copies > copies)
        stream.check(want)
        for rank, worker in enumerate(mesh.controller.mesh.ranks.workers):
            held = ray.get(worker.handle.held.remote(), timeout=10)
            placed = mesh.epoch.placement.of_actor(rank)
            assert {layer: set(ids) for layer, ids in held.items() if ids} == {
                layer: set(ids) for layer, ids in placed.items() if ids
            }
    finally:
        mesh.stop()
