"""Plans carried out on made-up workers: what is routed is always held, whatever goes wrong."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.mover import Mover, PlanAbandoned
from tests.support.fake_workers import FakeMesh


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMesh]:
    made = FakeMesh(monkeypatch)
    yield made
    made.controller.stop()


def carry_out(mesh: FakeMesh, mover: Mover, seed: int) -> None:
    ranks, slots = mesh.mesh.ranks, mesh.mesh.slots
    loads = np.random.default_rng(seed).lognormal(0.0, 1.5, (2, 8))
    plan = balance(loads, ranks.placement, slots=slots)
    mover.carry_out(plan, mesh.mesh.epoch.number, list(ranks.workers), slots)


def mover_of(mesh: FakeMesh) -> Mover:
    pool: Any = mesh.pool
    return Mover(mesh.controller, pool, transfer_s=1.0)


def check_exactly_held(mesh: FakeMesh) -> None:
    mesh.check()
    for rank, worker in enumerate(mesh.mesh.ranks.workers):
        placed = mesh.mesh.ranks.placement.of_actor(rank)
        assert {layer: set(ids) for layer, ids in placed.items()} == worker.handle.held
        assert {layer: set(ids) for layer, ids in worker.held.items()} == worker.handle.held


def test_plans_follow_one_another_and_nothing_is_left_behind(mesh: FakeMesh) -> None:
    mover = mover_of(mesh)
    for seed in range(10):
        carry_out(mesh, mover, seed)
        check_exactly_held(mesh)
    assert mover.moves.plans == 10 and mover.moves.copies > 10 and mesh.mesh.epoch.number == 0


@pytest.mark.parametrize("copies", range(0, 6))
def test_a_copy_that_fails_ends_the_plan_where_it_is_whole(mesh: FakeMesh, copies: int) -> None:
    mover = mover_of(mesh)
    carry_out(mesh, mover, 0)
    for worker in mesh.mesh.ranks.workers:
        worker.handle.adopts = worker.handle.adopted + copies
    with pytest.raises(PlanAbandoned, match="could not adopt an expert: checksum mismatch"):
        for seed in range(1, 20):
            carry_out(mesh, mover, seed)
    assert mover.moves.failed == 1 and "checksum mismatch" in mover.moves.last_error
    check_exactly_held(mesh)
    for worker in mesh.mesh.ranks.workers:
        worker.handle.adopts = 10**9
    carry_out(mesh, mover, 99)
    check_exactly_held(mesh)


def test_an_epoch_that_ends_meanwhile_ends_the_plan(mesh: FakeMesh) -> None:
    mover, ranks, slots = mover_of(mesh), mesh.mesh.ranks, mesh.mesh.slots
    plan = balance(np.random.default_rng(0).lognormal(0, 1.5, (2, 8)), ranks.placement, slots=slots)
    workers = list(ranks.workers)
    mesh.kill(workers[2])
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    with pytest.raises(PlanAbandoned):
        mover.carry_out(plan, 0, workers, slots)
    check_exactly_held(mesh)


def test_a_flip_that_reaches_only_some_is_finished_by_a_new_epoch(mesh: FakeMesh) -> None:
    mover = mover_of(mesh)
    mesh.mesh.attention[0].handle.deaf = True
    with pytest.raises(PlanAbandoned, match="epoch 0 ended"):
        carry_out(mesh, mover, 0)
    mesh.settle(lambda: mesh.mesh.epoch.number == 1)
    check_exactly_held(mesh)


def test_actors_that_hold_more_than_a_larger_mesh_gives_them_are_relieved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = FakeMesh(monkeypatch, experts=1)
    try:
        assert mesh.mesh.slots == 8
        mesh.controller.scale(experts=3, attention=None)
        mesh.settle(lambda: len(mesh.provisioner.wanted) == 2)
        for _ in range(2):
            newcomer = mesh.provisioner.arrive()
            assert {len(ids) for ids in newcomer.held.values()} == {4}
        mesh.settle(lambda: len(mesh.mesh.epoch.experts) == 3)
        assert mesh.mesh.slots == 4
        carry_out(mesh, mover_of(mesh), 0)
        check_exactly_held(mesh)
        for actors in mesh.mesh.ranks.placement.held.values():
            assert max(map(len, actors)) <= 4
    finally:
        mesh.controller.stop()
