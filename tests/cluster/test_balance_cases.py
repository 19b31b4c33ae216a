"""Counts that do not divide and loads that are absurd; small cases against an exact oracle."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from expertmesh.cluster.balancing.plan import BalanceError
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.balancing.waves import schedule
from expertmesh.cluster.placement import Placement, contiguous_placement
from tests.support.least_load import by_linear_program
from tests.support.wave_runner import run

RNG = np.random.default_rng(11)

LOADS = {
    "one expert has 90 %": lambda n: np.where(np.arange(n) == n // 2, 9.0 * n, 1.0),
    "one hot": lambda n: np.eye(n)[n - 1],
    "all zero": lambda n: np.zeros(n),
    "1e12": lambda n: np.random.default_rng(n).lognormal(0, 1, n) * 1e12,
    "skewed": lambda n: np.random.default_rng(n).lognormal(0, 2, n),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize(
    ("experts", "actors", "copies"), [(256, 32, 288), (896, 64, 960), (896, 5, 900), (12, 3, 15)]
)
def test_after_the_moves_every_slot_has_its_expert(
    name: str, experts: int, actors: int, copies: int
) -> None:
    slots = copies // actors
    old = contiguous_placement((1, 2), experts, actors)
    old = balance(RNG.uniform(0.5, 2.0, (2, experts)), old, slots=slots).placement
    loads = np.stack([LOADS[name](experts)] * 2)
    plan = balance(loads, old, slots=slots)
    if name == "all zero":
        assert plan.placement == old
    waves = schedule(plan, old, slots)
    reached = run(old, waves, slots, 1, actors)  # hashes every slot, refuses duplicates
    assert reached == (plan.placement if waves else old)
    assert plan.after <= plan.before + 1e-9


@pytest.mark.parametrize("experts", [7, 12, 896])
@pytest.mark.parametrize("actors", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_counts_need_not_divide(experts: int, actors: int, spare: int) -> None:
    slots = -(-experts // actors) + spare
    old = contiguous_placement((1,), experts, actors)
    loads = np.random.default_rng(experts).lognormal(0, 0.45, (1, experts))
    plan = balance(loads, old, slots=slots)
    (rows,) = plan.placement.held.values()
    assert {expert for ids in rows for expert in ids} == set(range(experts))
    assert all(len(ids) == len(set(ids)) <= slots for ids in rows)
    # Slots that could hold a copy do.
    assert all(len(ids) == min(slots, experts) for ids in rows)


@pytest.mark.parametrize(
    ("experts", "actors", "slots", "needed"), [(7, 2, 3, 4), (896, 64, 13, 14), (12, 5, 0, 3)]
)
def test_too_few_slots_are_refused_with_the_number_needed(
    experts: int, actors: int, slots: int, needed: int
) -> None:
    old = contiguous_placement((1,), experts, actors)
    with pytest.raises(BalanceError, match=rf"{experts} experts.*at least {needed} slots"):
        balance(np.ones((1, experts)), old, slots=slots)


def test_leaving_actors_whose_experts_have_no_room_are_refused() -> None:
    old = contiguous_placement((1,), 12, 3)
    with pytest.raises(BalanceError, match=r"2 actors with 5 slots cannot hold 12.*at least 6"):
        balance(np.ones((1, 12)), old, slots=5, leaving=frozenset({1}))


@pytest.mark.parametrize("seed", range(12))
def test_small_plans_come_near_the_best_that_any_placement_can_do(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, actors, slots = 8, 3, 4
    load_E = rng.lognormal(0, 0.9, experts)
    old = contiguous_placement((1,), experts, actors)
    plan = balance(load_E[None], old, slots=slots)
    best = least_possible(load_E, actors, slots)
    mean = load_E.sum() / actors
    holds_PE = held_in(plan.placement, experts)
    reached = by_linear_program(holds_PE, load_E) / mean
    assert best / mean - 1e-6 <= reached <= max(1.025, 1.05 * best / mean)


def held_in(placement: Placement, experts: int) -> NDArray[np.bool_]:
    (rows,) = placement.held.values()
    holds_PE = np.zeros((len(rows), experts), bool)
    for actor, ids in enumerate(rows):
        holds_PE[actor, list(ids)] = True
    return holds_PE


def least_possible(load_E: NDArray[np.float64], actors: int, slots: int) -> float:
    """The least load of the most loaded actor over all placements and splits: a mixed-integer
    program over held [P, E] (0 or 1), the part served there [P, E] and the greatest load."""
    experts = len(load_E)
    cells = actors * experts
    cost = np.zeros(2 * cells + 1)
    cost[-1] = 1.0
    rows, low, high = [], [], []

    def constrain(held: NDArray, part: NDArray, most: float, lo: float, hi: float) -> None:
        rows.append(np.concatenate([held.ravel(), part.ravel(), [most]]))
        low.append(lo)
        high.append(hi)

    none = np.zeros((actors, experts))
    for expert in range(experts):
        column = none.copy()
        column[:, expert] = 1.0
        constrain(none, column, 0.0, 1.0, 1.0)
    for actor in range(actors):
        row = none.copy()
        row[actor] = 1.0
        constrain(row, none, 0.0, 0.0, slots)
        constrain(none, row * load_E, -1.0, -np.inf, 0.0)
        for expert in range(experts):
            cell = none.copy()
            cell[actor, expert] = 1.0
            constrain(-cell, cell, 0.0, -np.inf, 0.0)
    solved = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.concatenate([np.ones(cells), np.zeros(cells + 1)]),
        bounds=Bounds(0.0, np.concatenate([np.ones(2 * cells), [np.inf]])),
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)
