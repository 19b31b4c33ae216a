"""Growing, shrinking and rebalancing a real mesh under streams: nothing pauses, no bit changes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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


@pytest.fixture(scope="module")
def planned(model: Path) -> Iterator[Mesh]:
    """Three expert actors that only the tests' own plans change."""
    engine = EngineSettings(pages=64, slots=8, step_tokens=64)
    name = f"t{os.getpid()}-planned"
    mesh = start(settings(model, name=name, expert_actors=3, engine=engine, rebalance=STILL))
    yield mesh
    mesh.stop()


def random_plan(mesh: Mesh, draw: np.random.Generator) -> None:
    """Carried out. Raises PlanAbandoned."""
    ranks, epoch, slots = mesh.controller.mesh.ranks, mesh.epoch.number, mesh.controller.mesh.slots
    loads = draw.lognormal(0.0, 1.5, (len(ranks.placement.held), 7))
    plan = balance(loads, ranks.placement, slots=slots)
    mesh.upkeep.mover.carry_out(plan, epoch, list(ranks.workers), slots)


def test_plans_without_end_change_no_bit_of_decode_or_chunked_prefill(
    model: Path, planned: Mesh
) -> None:
    long = [7 * i % 300 + 1 for i in range(400)]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    requests = [ask(f"r{i}", i, 60) for i in range(3)]
    requests.append(GenerateRequest("long", long, params))
    want = one_process(model, 1, requests)
    stream, moves = Stream(planned, requests), planned.upkeep.mover.moves
    draw = np.random.default_rng(0)

    def storm() -> bool:
        random_plan(planned, draw)
        return moves.copies >= 40

    stream.until(storm)
    stream.check(want)
    assert moves.failed == 0 and planned.epoch.number == 0
    assert planned.epoch.version > 10


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_death_in_the_middle_of_a_plan_leaves_nothing_half_moved(
    model: Path, planned: Mesh, victim: int
) -> None:
    """The plan is given up, the mesh recovers, and the next plan is carried out."""
    requests = [ask(f"r{i}", i, 60) for i in range(3)]
    want = one_process(model, 1, requests)
    stream, moves, controller = (
        Stream(planned, requests),
        planned.upkeep.mover.moves,
        planned.controller,
    )
    draw = np.random.default_rng(victim)
    copied, joined = moves.copies, controller.counts.joins

    def strike() -> None:
        end = time.monotonic() + 60
        while moves.copies < copied + 3:
            assert time.monotonic() < end, "nothing is moved"
            time.sleep(0.001)
        os.kill(controller.mesh.ranks.workers[victim].member.pid, signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()
    with pytest.raises(PlanAbandoned):
        stream.until(lambda: random_plan(planned, draw) is not None)
    stream.until(lambda: controller.counts.joins == joined + 1 and size(planned) == (1, 3))
    copied = moves.copies
    stream.until(lambda: random_plan(planned, draw) is None and moves.copies > copied)
    stream.check(want)
    for rank, worker in enumerate(controller.mesh.ranks.workers):
        held = ray.get(worker.handle.held.remote(), timeout=10)
        placed = planned.epoch.placement.of_actor(rank)
        assert {layer: set(ids) for layer, ids in held.items() if ids} == {
            layer: set(ids) for layer, ids in placed.items() if ids
        }
