import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cluster.balancing.plan import BalanceError, Plan
from expertmesh.cluster.balancing.waves import schedule
from expertmesh.cluster.placement import Placement
from tests.support.wave_runner import run

Rows = tuple[tuple[int, ...], ...]


@st.composite
def rows(draw: st.DrawFn, experts: int, actors: int, slots: int) -> Rows:
    """Every expert once, then copies wherever one fits."""
    sizes = [0] * actors
    held: list[list[int]] = [[] for _ in range(actors)]
    for expert in draw(st.permutations(range(experts))):
        actor = draw(st.sampled_from([a for a in range(actors) if sizes[a] < slots]))
        held[actor].append(expert)
        sizes[actor] += 1
    for expert, actor in draw(
        st.lists(st.tuples(st.integers(0, experts - 1), st.integers(0, actors - 1)), max_size=20)
    ):
        if sizes[actor] < slots and expert not in held[actor]:
            held[actor].append(expert)
            sizes[actor] += 1
    return tuple(map(tuple, held))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Placement, Placement, int]:
    """(old, new, slots): anything to anything, mostly without a slot to spare."""
    actors = draw(st.integers(1, 5))
    slots = draw(st.integers(1, 4))
    experts = draw(st.integers(1, actors * slots))
    layers = range(draw(st.integers(1, 3)))
    some = rows(experts, actors, slots)
    old = Placement({layer: draw(some) for layer in layers})
    return old, Placement({layer: draw(some) for layer in layers}), slots


def plan_of(old: Placement, new: Placement) -> Plan:
    nothing = np.ones(len(old.held))
    return Plan(old, new, nothing, nothing)


@given(change=changes(), staging=st.integers(1, 2))
def test_waves_lead_to_the_plan_and_keep_every_expert_served(
    change: tuple[Placement, Placement, int], staging: int
) -> None:
    old, new, slots = change
    plan = plan_of(old, new)
    waves = schedule(plan, old, slots, staging)
    assert waves == schedule(plan, old, slots, staging)
    reached = run(old, waves, slots, staging, new.actors)
    if waves:
        assert reached == new
    assert sum(len(wave.moves) for wave in waves) == len(plan.moves)
    assert sum(len(wave.drops) for wave in waves) == len(plan.drops)


def test_a_full_ring_turns_in_one_wave() -> None:
    old = Placement({1: ((0,), (1,), (2,))})
    new = Placement({1: ((2,), (0,), (1,))})
    (wave,) = schedule(plan_of(old, new), old, 1)
    assert len(wave.moves) == 3 and len(wave.rounds) == 3
    assert wave.placement == new


def test_a_swap_is_one_meeting() -> None:
    old = Placement({1: ((0, 1), (2, 3))})
    new = Placement({1: ((0, 3), (2, 1))})
    (wave,) = schedule(plan_of(old, new), old, 2)
    assert len(wave.rounds) == 1


def test_joining_and_leaving_actors() -> None:
    old = Placement({1: ((0, 1), (2, 3)), 2: ((3, 2), (1, 0))})
    new = Placement({1: ((), (2, 3), (0, 1)), 2: ((), (1, 0), (2, 3))})
    waves = schedule(plan_of(old, new), old, 2)
    assert len(waves) == 4  # one staged copy at a time, over both layers
    assert run(old, waves, 2, 1, 3) == new


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (((0, 1, 2), (2,)), r"layer 1.*actor 0 is over 2"),
        (((0,), (2,)), r"layer 1.*expert 1 is nowhere"),
    ],
)
def test_invalid_plans_are_refused(new: Rows, message: str) -> None:
    old = Placement({1: ((0, 1), (2,))})
    with pytest.raises(BalanceError, match=message):
        schedule(plan_of(old, Placement({1: new})), old, 2)


def test_no_change_needs_no_wave() -> None:
    old = Placement({1: ((0, 1), (2,))})
    assert schedule(plan_of(old, Placement({1: ((1, 0), (2,))})), old, 2) == ()
    with pytest.raises(BalanceError, match="staging"):
        schedule(plan_of(old, old), old, 2, staging=0)
