"""Wishes of operators: numbers, changes, and what is refused with its field."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expertmesh.cluster import operators
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.mover import Mover
from tests.support.fake_workers import FakeMesh


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMesh]:
    made = FakeMesh(monkeypatch)
    yield made
    made.controller.stop()


@pytest.mark.parametrize(("wish", "becomes"), [(5, 5), ("5", 5), ("+1", 4), ("-1", 2)])
def test_numbers_and_changes(mesh: FakeMesh, wish: Any, becomes: int) -> None:
    answer = operators.scale(mesh.controller, wish, None, False)
    assert answer["experts"] == {"from": 3, "to": becomes} and answer["dry_run"] is False
    assert answer["attention"] == {"from": 2, "to": 2}
    assert mesh.controller.desired() == {"expert": becomes, "attention": 2}


def test_a_dry_run_says_what_would_be(mesh: FakeMesh) -> None:
    assert operators.scale(mesh.controller, "+2", "+1", True) == {
        "dry_run": True,
        "experts": {"from": 3, "to": 5},
        "attention": {"from": 2, "to": 3},
    }
    assert mesh.controller.desired() == {"expert": 3, "attention": 2}


@pytest.mark.parametrize(
    ("experts", "attention", "field"),
    [
        (None, None, "experts"),
        ("many", None, "experts"),
        (True, None, "experts"),
        (2.5, None, "experts"),
        ("+-1", None, "experts"),
        ("-3", None, "experts"),
        (9, None, "experts"),
        (None, "-2", "attention"),
        (None, "²", "attention"),
        (None, "9" * 5000, "attention"),
    ],
)
def test_what_is_no_size_is_refused(
    mesh: FakeMesh, experts: Any, attention: Any, field: str
) -> None:
    with pytest.raises(ScaleError) as caught:
        operators.scale(mesh.controller, experts, attention, False)
    assert caught.value.field == field and field in str(caught.value)
    assert mesh.controller.desired() == {"expert": 3, "attention": 2}


def test_the_status_names_everybody(mesh: FakeMesh) -> None:
    pool: Any = mesh.pool
    status = operators.status(mesh.controller, Mover(mesh.controller, pool, 1.0))
    assert status["state"] == "ready" and status["desired"] == {"attention": 2, "experts": 3}
    assert [one["seat"] for one in status["experts"]] == ["expert-0", "expert-1", "expert-2"]
    assert {one["pid"] for one in status["attention"]} == {1000, 1001}
    assert status["slots_per_actor"] == 4 and status["seconds_since_rebalance"] is None


def test_neither_a_look_nor_a_wish_waits_for_a_recovery(
    mesh: FakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool: Any = mesh.pool
    monkeypatch.setattr(operators, "LOCK_S", 0.01)
    ask, reading, read = mesh.pool.ask, threading.Event(), threading.Event()

    def slow(workers: Any, calls: Any, what: str, limit: float) -> Any:
        if what == "load more":
            reading.set()
            assert read.wait(10.0)
        return ask(workers, calls, what, limit)

    monkeypatch.setattr(mesh.pool, "ask", slow)
    mesh.kill(mesh.mesh.ranks.workers[1])
    assert reading.wait(10.0)
    try:
        status = operators.status(mesh.controller, Mover(mesh.controller, pool, 1.0))
        assert status["state"] == "recovering" and "was killed" in status["reason"]
        assert [one["seat"] for one in status["experts"]] == ["expert-0", "expert-2"]
        assert operators.scale(mesh.controller, "+1", None, False)["experts"]["to"] == 4
    finally:
        read.set()
    mesh.settle(lambda: len(mesh.provisioner.wanted) == 2)
    mesh.check()


def test_a_plan_in_numbers(mesh: FakeMesh) -> None:
    loads = np.random.default_rng(1).lognormal(0.0, 2.0, (2, 8))
    plan = balance(loads, mesh.mesh.ranks.placement, slots=4)
    told = operators.rebalance(plan, True)
    assert told["moves"] == len(plan.moves) and told["imbalance"]["before"] > 1.0
    assert operators.rebalance(None, False)["imbalance"] is None
