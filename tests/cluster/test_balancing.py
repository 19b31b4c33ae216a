import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertmesh.cluster.balancing.plan import BalanceError
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.placement import Placement, contiguous_placement


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, Placement, int, int, frozenset[int]]:
    """(loads, old, slots, ranks, leaving), always possible."""
    actors = draw(st.integers(1, 6))
    experts = draw(st.integers(actors, 40))
    joins = draw(st.integers(0, 2))
    ranks = actors + joins
    leaving = draw(st.frozensets(st.integers(0, ranks - 1), max_size=ranks - 1))
    smallest = -(-experts // min(actors, ranks - len(leaving)))
    slots = draw(st.integers(smallest, smallest + 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    layers = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["lognormal", "one hot", "zero", "equal", "ninety", "huge"]))
    loads = {
        "lognormal": rng.lognormal(0, 1, (layers, experts)),
        "one hot": np.eye(experts)[rng.integers(0, experts, layers)],
        "zero": np.zeros((layers, experts)),
        "equal": np.full((layers, experts), 3.0),
        "ninety": np.where(np.arange(experts) == 0, 9.0 * experts, 1.0) * np.ones((layers, 1)),
        "huge": rng.lognormal(0, 1, (layers, experts)) * 1e12,
    }[kind]
    old = contiguous_placement(tuple(range(1, layers + 1)), experts, actors)
    if draw(st.booleans()):
        before = rng.lognormal(0, 1, (layers, experts))
        old = balance(before, old, slots=slots).placement
    return loads, old, slots, ranks, leaving


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_every_plan_is_valid(
    case: tuple[np.ndarray, Placement, int, int, frozenset[int]],
) -> None:
    loads, old, slots, ranks, leaving = case
    plan = balance(loads, old, slots=slots, ranks=ranks, leaving=leaving)
    assert (
        plan.placement == balance(loads, old, slots=slots, ranks=ranks, leaving=leaving).placement
    )
    assert tuple(plan.placement.held) == tuple(old.held)
    for rows in plan.placement.held.values():
        assert len(rows) == ranks
        assert {e for ids in rows for e in ids} == set(range(loads.shape[1]))
        for actor, ids in enumerate(rows):
            assert len(ids) == len(set(ids)) <= slots
            assert all(type(e) is int for e in ids)
            assert not (actor in leaving and ids)
    assert applied(plan.moves, plan.drops, old, ranks) == sets(plan.placement)
    for move in plan.moves:
        assert move.expert in old.held[move.layer][move.source]
    assert np.isfinite(plan.before_L).all() and (plan.after_L > 1 - 1e-9).all()


def sets(placement: Placement) -> dict[tuple[int, int], set[int]]:
    return {
        (layer, actor): set(ids)
        for layer, rows in placement.held.items()
        for actor, ids in enumerate(rows)
    }


def applied(moves, drops, old: Placement, ranks: int) -> dict[tuple[int, int], set[int]]:  # type: ignore[no-untyped-def]
    held = {(layer, actor): set() for layer in old.held for actor in range(ranks)}
    held |= sets(old)
    for move in moves:
        held[move.layer, move.target].add(move.expert)
    for drop in drops:
        held[drop.layer, drop.actor].remove(drop.expert)
    return held


@pytest.mark.parametrize(("value", "slots"), [(0.0, 4), (7.0, 4), (0.0, 5)])
def test_loads_that_say_nothing_keep_the_placement(value: float, slots: int) -> None:
    old = contiguous_placement((1, 2), 7, 2) if slots == 5 else full((1, 2), 7, 2)
    plan = balance(np.full((2, 7), value), old, slots=slots)
    assert plan.placement == old and plan.moves == () and plan.drops == ()


def full(layers: tuple[int, ...], experts: int, actors: int) -> Placement:
    """Without a free slot: 4 + 4 copies of 7 experts."""
    return Placement(dict.fromkeys(layers, ((0, 1, 2, 3), (4, 5, 6, 0))))


def test_equal_loads_only_fill_free_slots() -> None:
    old = contiguous_placement((1, 2), 7, 2)
    plan = balance(np.ones((2, 7)), old, slots=5)
    assert len(plan.moves) == 2 * 3 and plan.drops == ()


@pytest.mark.parametrize(
    ("loads", "slots", "ranks", "message"),
    [
        (np.full((1, 7), math.nan), 4, 2, "layer 3 expert 0 is nan"),
        (np.full((1, 7), math.inf), 4, 2, "layer 3 expert 0 is inf"),
        (-np.eye(7)[[2]], 4, 2, r"layer 3 expert 2 is -1\.0"),
        (np.ones(7), 4, 2, r"shape \[7\].*1 layers"),
        (np.ones((2, 7)), 4, 2, r"shape \[2, 7\].*1 layers"),
        (np.ones((1, 7)), 3, 2, "2 actors with 3 slots cannot hold 7.*at least 4"),
        (np.ones((1, 7)), 4, 1, "1 ranks are fewer than the 2"),
        (np.ones((1, 6)), 4, 2, "layer 3 holds expert 6, loads are for 6"),
        (np.ones((1, 8)), 4, 2, "layer 3: no actor holds expert 7"),
    ],
)
def test_impossible_input_is_refused_by_name(
    loads: np.ndarray, slots: int, ranks: int, message: str
) -> None:
    with pytest.raises(BalanceError, match=message):
        balance(loads, contiguous_placement((3,), 7, 2), slots=slots, ranks=ranks)
