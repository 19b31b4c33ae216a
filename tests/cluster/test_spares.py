import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cluster.spares import HEAVY, place_spares


def contiguous(actors: int, experts: int) -> np.ndarray:
    holds_PE = np.zeros((actors, experts), bool)
    holds_PE[np.arange(experts) * actors // experts, np.arange(experts)] = True
    return holds_PE


def with_spares(holds_PE: np.ndarray, load_E: np.ndarray, free_P: np.ndarray) -> np.ndarray:
    after_PE = holds_PE.copy()
    for actor, expert in place_spares(holds_PE, load_E, free_P):
        assert not after_PE[actor, expert], "an actor holds an expert once"
        after_PE[actor, expert] = True
    return after_PE


def reached(holds_PE: np.ndarray, start: int) -> set[int]:
    """Actors that load can flow to from `start`, over experts that both hold."""
    shared_PP = (holds_PE.astype(int) @ holds_PE.T.astype(int)) > 0
    seen, queue = {start}, [start]
    for actor in queue:
        new = set(np.flatnonzero(shared_PP[actor]).tolist()) - seen
        seen |= new
        queue += sorted(new)
    return seen


@pytest.mark.parametrize(("actors", "spare"), [(2, 1), (7, 1), (64, 1), (32, 2), (64, 3)])
def test_spares_connect_all_actors(actors: int, spare: int) -> None:
    load_E = np.random.default_rng(0).lognormal(sigma=0.45, size=14 * actors)
    after_PE = with_spares(contiguous(actors, 14 * actors), load_E, np.full(actors, spare))
    assert reached(after_PE, 0) == set(range(actors))
    assert (after_PE.sum(1) == 14 + spare).all()


def test_each_actor_gets_the_hottest_expert_of_another() -> None:
    load_E = np.random.default_rng(1).permutation(np.arange(100, 140))
    before_PE = contiguous(8, 40)
    hottest = {int(np.where(held, load_E, 0).argmax()) for held in before_PE}
    spares = place_spares(before_PE, load_E, np.ones(8, int))
    assert {expert for _, expert in spares} == hottest
    assert {actor for actor, _ in spares} == set(range(8))


def test_light_actors_take_from_heavy_ones() -> None:
    load_E = np.repeat([8.0, 7.0, 2.0, 1.0], 4)  # actors 0 and 1 are heavy, 2 and 3 light
    spares = place_spares(contiguous(4, 16), load_E, np.array([0, 0, 1, 1]))
    assert [expert // 4 for _, expert in sorted(spares)] in ([0, 1], [1, 0])


def test_very_hot_experts_get_more_copies() -> None:
    load_E = 1.0 / np.arange(1, 897)
    after_PE = with_spares(contiguous(64, 896), load_E, np.full(64, 2))
    copies_E, mean = after_PE.sum(0), load_E.sum() / 64
    assert copies_E[0] > copies_E[8] > copies_E[500]
    assert (load_E / copies_E <= HEAVY * mean).all()


def test_only_free_slots_are_filled() -> None:
    free_P = np.array([0, 3, 0, 1])
    after_PE = with_spares(contiguous(4, 12), np.arange(1.0, 13.0), free_P)
    assert (after_PE.sum(1) - 3 == free_P).all()


def test_an_actor_without_experts_is_filled() -> None:
    holds_PE = np.vstack([contiguous(3, 12), np.zeros(12, bool)])
    after_PE = with_spares(holds_PE, np.ones(12), np.array([0, 0, 0, 4]))
    assert after_PE[3].sum() == 4


def test_slots_stay_free_when_everything_is_held() -> None:
    assert place_spares(np.ones((2, 4), bool), np.ones(4), np.array([3, 3])) == []
    assert place_spares(np.ones((1, 4), bool), np.ones(4), np.array([3])) == []


def test_nothing_is_copied_that_nobody_holds() -> None:
    holds_PE = contiguous(3, 9)
    holds_PE[:, 4] = False  # lost with its last holder, and the hottest of all
    load_E = np.ones(9)
    load_E[4] = 100.0
    spares = place_spares(holds_PE, load_E, np.full(3, 2))
    assert len(spares) == 6
    assert 4 not in {expert for _, expert in spares}


@given(st.integers(1, 7), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_any_input_is_filled_as_far_as_it_can(actors: int, experts: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    holds_PE = rng.random((actors, experts)) < rng.choice([0.1, 0.5])
    holds_PE[rng.integers(0, actors, experts), np.arange(experts)] = True
    load_E = rng.integers(0, 50, experts) * rng.choice([0, 1])
    free_P = rng.integers(0, 5, actors)
    kept = holds_PE.copy(), load_E.copy(), free_P.copy()
    after_PE = with_spares(holds_PE, load_E, free_P)
    room_P = np.minimum(free_P, experts - holds_PE.sum(1))
    assert (after_PE.sum(1) - holds_PE.sum(1) == room_P).all()
    assert place_spares(holds_PE, load_E, free_P) == place_spares(holds_PE, load_E, free_P)
    for before, now in zip(kept, (holds_PE, load_E, free_P), strict=True):
        assert (before == now).all()
