"""What plans are worth at the shape of K3 (fewer layers), judged on a window they have not seen."""

import numpy as np
import pytest
from numpy.typing import NDArray

from expertmesh.cluster.balancing.plan import Plan
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.groups.types import Groups, contiguous_groups
from expertmesh.cluster.placement import Placement, contiguous_placement
from tests.support import load_windows
from tests.support.eplb import balanced_packing, packing_of_all_layers, rebalance_experts
from tests.support.least_load import by_linear_program

LAYERS, EXPERTS, ACTORS, SLOTS = 4, 896, 64, 15
PLACES = {"same": 0.0, "drift": 0.1, "new": 1.0}
MOVED = {"same": 0.01, "drift": 0.03, "new": 0.07}
# Ten percent over the goal where four layers and one seed are too few for the mean of 92.
NOISE = 1.1


@pytest.mark.parametrize("kind", ["lognormal 0.45", "lognormal 0.9", "zipf 1.0"])
def test_plans_move_little_and_hold_on_the_next_window(kind: str) -> None:
    rng = np.random.default_rng(7)
    old_popularity = load_windows.popularity(rng, kind, LAYERS, EXPERTS)
    old = contiguous_placement(tuple(range(LAYERS)), EXPERTS, ACTORS)
    for _ in range(2):
        old = balance(load_windows.window(rng, old_popularity), old, slots=SLOTS).placement
    for change, part in PLACES.items():
        popularity = load_windows.drifted(rng, kind, old_popularity, part)
        plan = balance(load_windows.window(rng, popularity), old, slots=SLOTS)
        following = load_windows.window(rng, popularity)
        imbalance_L = [
            best_imbalance(rows, load_E)
            for rows, load_E in zip(plan.placement.held.values(), following, strict=True)
        ]
        assert np.mean(imbalance_L) <= 1.03, (change, imbalance_L)
        assert max(imbalance_L) <= 1.05, (change, imbalance_L)
        assert moved(plan) <= MOVED[change] * NOISE, change


def best_imbalance(rows: tuple[tuple[int, ...], ...], load_E: NDArray[np.float64]) -> float:
    holds_PE = np.zeros((len(rows), len(load_E)), bool)
    for actor, ids in enumerate(rows):
        holds_PE[actor, list(ids)] = True
    return by_linear_program(holds_PE, load_E) / (load_E.sum() / len(rows))


def moved(plan: Plan) -> float:
    return len(plan.moves) / sum(len(ids) for rows in plan.placement.held.values() for ids in rows)


def test_a_hot_expert_gets_copies_and_a_cold_one_gives_its_spare_copies() -> None:
    rng = np.random.default_rng(3)
    loads = rng.uniform(0.9, 1.1, (1, EXPERTS))
    loads[0, 5] = 100.0  # 7 actors' worth
    old = contiguous_placement((1,), EXPERTS, ACTORS)
    hot = balance(loads, old, slots=SLOTS)
    copies = hot.replicas_LE(EXPERTS)[0]
    assert copies[5] >= 7
    loads[0, 5], loads[0, 6] = 1.0, 100.0
    cooled = balance(loads, hot.placement, slots=SLOTS)
    copies = cooled.replicas_LE(EXPERTS)[0]
    assert copies[6] >= 7 and copies[5] < 7
    assert cooled.after < 1.03 < cooled.before


def test_actors_that_join_take_their_part_and_those_that_leave_end_empty() -> None:
    rng = np.random.default_rng(5)
    loads = load_windows.window(rng, load_windows.popularity(rng, "lognormal 0.45", 2, EXPERTS))
    old = contiguous_placement((0, 1), EXPERTS, ACTORS)
    old = balance(loads, old, slots=SLOTS).placement
    joined = balance(loads, old, slots=SLOTS, ranks=ACTORS + 1)
    # About 1/65 of the copies, and what evens out.
    assert moved(joined) <= 0.03
    assert joined.after <= 1.03
    left = balance(loads, joined.placement, slots=SLOTS, leaving=frozenset({2}))
    assert all(rows[2] == () for rows in left.placement.held.values())
    assert moved(left) <= 0.04
    assert left.after <= 1.03


def test_the_baseline_prints_what_its_description_shows() -> None:
    weight = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ],
        np.float64,
    )
    for packing in (balanced_packing, packing_of_all_layers):
        placed = rebalance_experts(weight, 16, 4, 2, 8, packing)
        assert placed.tolist() == [
            [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
            [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
        ]


def test_both_versions_of_the_baseline_agree() -> None:
    weight = np.random.default_rng(1).lognormal(0, 0.9, (3, 64))
    answers = [
        rebalance_experts(weight, 80, 1, 1, 8, packing)
        for packing in (balanced_packing, packing_of_all_layers)
    ]
    assert (answers[0] == answers[1]).all()


def test_windows_count_every_pick_once() -> None:
    rng = np.random.default_rng(2)
    counts = load_windows.window(rng, load_windows.popularity(rng, "zipf 1.0", 3, EXPERTS))
    assert counts.max() <= load_windows.TOKENS
    picks = load_windows.TOKENS * load_windows.TOP_K
    assert np.allclose(counts.sum(1), picks, rtol=0.01)


def test_the_old_placement_is_not_changed() -> None:
    old = contiguous_placement((1,), 8, 2)
    before = Placement(dict(old.held))
    balance(np.arange(8.0)[None], old, slots=6)
    assert old == before


def test_groups_stay_together_where_balance_allows() -> None:
    layers = tuple(range(LAYERS))
    groups = contiguous_groups(layers, EXPERTS, ACTORS)
    strays, after = strays_after_changes(groups)
    assert strays < 0.8 * strays_after_changes(None)[0]
    assert after <= 1.03


def strays_after_changes(groups: Groups | None) -> tuple[int, float]:
    """Experts without a copy on the actor of their contiguous group, and the imbalance, after
    three plans for popularities that have nothing to do with each other."""
    placement = contiguous_placement(tuple(range(LAYERS)), EXPERTS, ACTORS)
    after = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        popularity = load_windows.popularity(rng, "lognormal 0.9", LAYERS, EXPERTS)
        loads = load_windows.window(rng, popularity)
        plan = balance(loads, placement, slots=SLOTS, groups=groups)
        placement, after = plan.placement, plan.after
    each = EXPERTS // ACTORS
    strays = sum(
        e not in rows[e // each] for rows in placement.held.values() for e in range(EXPERTS)
    )
    return strays, after
