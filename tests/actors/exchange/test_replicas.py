import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.exchange.replica_graph import PULL, replica_graph
from expertmesh.actors.exchange.replica_split import augment
from expertmesh.actors.exchange.replicas import ReplicaChoice
from expertmesh.cluster.spares import place_spares
from tests.support.least_load import by_linear_program, by_subsets
from tests.support.routing_loads import (
    choose,
    expected_counts,
    fan_out,
    lognormal,
    one_copy_each,
    zipf,
)


@st.composite
def placements(draw: st.DrawFn) -> np.ndarray:
    """Up to 7 actors, some of which may hold nothing; every expert has a holder."""
    actors, experts = draw(st.integers(1, 7)), draw(st.integers(1, 14))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    holds_PE = rng.random((actors, experts)) < draw(st.sampled_from([0.0, 0.15, 0.3, 0.6, 1.0]))
    holds_PE[rng.integers(0, draw(st.integers(1, actors)), experts), np.arange(experts)] = True
    return holds_PE


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A placement and int64 [T, K] ids, different within a row."""
    holds_PE = draw(placements())
    experts = holds_PE.shape[1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    popularity_E = rng.lognormal(sigma=draw(st.sampled_from([0.0, 1.0, 3.0])), size=experts)
    top_k = draw(st.integers(1, experts))
    return holds_PE, choose(rng, popularity_E, draw(st.integers(1, 80)), top_k)


def spared(holds_PE: np.ndarray, load_E: np.ndarray, spares: int) -> np.ndarray:
    holds_PE = holds_PE.copy()
    for actor, expert in place_spares(holds_PE, load_E, np.full(len(holds_PE), spares)):
        holds_PE[actor, expert] = True
    return holds_PE


def served_by(choice: ReplicaChoice, holds_PE: np.ndarray, ids_TK: np.ndarray) -> np.ndarray:
    """The load of each actor, after checking that holders serve."""
    actors_TK = choice.assign(ids_TK)
    assert actors_TK.dtype == np.int32
    assert actors_TK.shape == ids_TK.shape
    assert holds_PE[actors_TK, ids_TK].all()
    return np.bincount(actors_TK.reshape(-1), minlength=len(holds_PE))


@given(placements(), st.integers(0, 2**32 - 1), st.sampled_from([1, 4, 60]))
def test_the_largest_load_is_the_least_possible(holds_PE: np.ndarray, seed: int, most: int) -> None:
    counts_E = np.random.default_rng(seed).integers(0, most + 1, holds_PE.shape[1])
    served_PG, load_P = ReplicaChoice(holds_PE).split(counts_E)
    assert load_P.max() == by_subsets(holds_PE, counts_E)
    assert load_P.sum() == counts_E.sum()
    assert (served_PG >= 0).all()
    sets, set_of = np.unique(holds_PE.T[holds_PE.sum(0) > 1], axis=0, return_inverse=True)
    counts_G = np.zeros(len(sets), int)
    np.add.at(counts_G, set_of.reshape(-1), counts_E[holds_PE.sum(0) > 1])
    assert (served_PG.sum(0) == counts_G).all()
    assert not served_PG[~sets.T].any()
    alone_P = holds_PE.astype(int) @ np.where(holds_PE.sum(0) == 1, counts_E, 0)
    assert (served_PG.sum(1) + alone_P == load_P).all()


@pytest.mark.parametrize("actors", [32, 64])
@pytest.mark.parametrize("slots", [64, 128])
@pytest.mark.parametrize("hot", ["lognormal 0.45", "lognormal 0.9", "zipf 1.0"])
def test_k3_shape_against_a_linear_program(actors: int, slots: int, hot: str) -> None:
    rng = np.random.default_rng(7)
    kind, number = hot.split()
    popularity_E = {"lognormal": lognormal, "zipf": zipf}[kind](rng, 896, float(number))
    load_E = expected_counts(popularity_E, 2048, 16)
    holds_PE = spared(one_copy_each(load_E, actors), load_E, slots // actors)
    ids_TK = choose(rng, popularity_E, 2048, 16)
    load_P = served_by(ReplicaChoice(holds_PE), holds_PE, ids_TK)
    fractional = by_linear_program(holds_PE, np.bincount(ids_TK.reshape(-1), minlength=896))
    assert load_P.max() == math.ceil(fractional - 1e-6)


def test_published_load_is_balanced_in_every_step() -> None:
    ratios: dict[int, list[float]] = {32: [], 64: []}
    for seed in range(8):
        rng = np.random.default_rng(seed)
        popularity_E = lognormal(rng, 896, 0.45)
        load_E = expected_counts(popularity_E, 2048, 16)
        ids_TK = choose(rng, popularity_E, 2048, 16)
        for actors, values in ratios.items():
            holds_PE = spared(one_copy_each(load_E, actors), load_E, 64 // actors)
            load_P = served_by(ReplicaChoice(holds_PE), holds_PE, ids_TK)
            values.append(load_P.max() / load_P.mean())
    assert np.mean(ratios[32]) <= 1.005
    assert np.mean(ratios[64]) <= 1.02


@given(steps())
def test_tokens_meet_the_split(step: tuple[np.ndarray, np.ndarray]) -> None:
    holds_PE, ids_TK = step
    kept = ids_TK.copy()
    choice = ReplicaChoice(holds_PE, few=0)
    counts_E = np.bincount(ids_TK.reshape(-1), minlength=holds_PE.shape[1])
    load_P = served_by(choice, holds_PE, ids_TK)
    assert (load_P == choice.split(counts_E)[1]).all()
    assert (ids_TK == kept).all()


@given(steps(), st.sampled_from([0, 32]))
def test_every_rank_finds_the_same(step: tuple[np.ndarray, np.ndarray], few: int) -> None:
    holds_PE, ids_TK = step
    first = ReplicaChoice(holds_PE, few).assign(ids_TK)
    again = ReplicaChoice(np.asfortranarray(holds_PE), few)
    again.assign(ids_TK[::-1])  # nothing stays behind
    assert (again.assign(np.asfortranarray(ids_TK)) == first).all()
    assert holds_PE[first, ids_TK].all()


@given(steps(), st.randoms(use_true_random=False))
def test_companions_do_not_break_the_balance(step, random) -> None:
    holds_PE, ids_TK = step
    choice = ReplicaChoice(holds_PE, few=0)
    order = list(range(len(ids_TK)))
    random.shuffle(order)
    load_P = served_by(choice, holds_PE, ids_TK)
    assert (served_by(choice, holds_PE, ids_TK[order]) == load_P).all()


@pytest.mark.parametrize("few", [0, 32])
def test_no_rows_and_one_row(few: int) -> None:
    holds_PE = np.array([[1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]], bool)
    choice = ReplicaChoice(holds_PE, few)
    assert choice.assign(np.empty((0, 2), np.int64)).shape == (0, 2)
    for ids in ([0, 1], [2, 3], [3, 1]):
        served_by(choice, holds_PE, np.array([ids]))


def test_one_expert_takes_everything() -> None:
    holds_PE = np.array([[1, 1], [1, 0], [1, 0], [0, 1]], bool)
    load_P = served_by(ReplicaChoice(holds_PE), holds_PE, np.zeros((100, 1), np.int64))
    assert sorted(load_P.tolist()) == [0, 33, 33, 34]
    alone = served_by(ReplicaChoice(holds_PE), holds_PE, np.ones((100, 1), np.int64))
    assert sorted(alone.tolist()) == [0, 0, 50, 50]


def test_without_copies_it_is_a_table() -> None:
    holds_PE = np.eye(4, dtype=bool)[[2, 0, 3, 1]]
    ids_TK = np.arange(4).repeat(3).reshape(4, 3)
    home_E = holds_PE.argmax(0)
    assert (ReplicaChoice(holds_PE).assign(ids_TK) == home_E[ids_TK]).all()


def test_an_expert_without_holder_is_named() -> None:
    with pytest.raises(ValueError, match=r"no actor holds experts \[1\] \(1 in all\)"):
        ReplicaChoice(np.array([[1, 0, 0], [0, 0, 1]], bool))


@pytest.mark.parametrize("rows", [2, 8, 32, 34, 512])
def test_two_equal_actors_share_whole_tokens(rows: int) -> None:
    holds_PE = np.ones((2, 16), bool)
    ids_TK = choose(np.random.default_rng(rows), np.ones(16), rows, 4)
    actors_TK = ReplicaChoice(holds_PE).assign(ids_TK)
    assert fan_out(actors_TK) == 1.0
    assert np.bincount(actors_TK.reshape(-1)).tolist() == [2 * rows, 2 * rows]


def test_tokens_stay_where_they_are_already() -> None:
    rng = np.random.default_rng(3)
    popularity_E = lognormal(rng, 896, 0.45)
    load_E = expected_counts(popularity_E, 2048, 16)
    holds_PE = spared(one_copy_each(load_E, 32), load_E, 4)
    ids_TK = choose(rng, popularity_E, 2048, 16)
    home_TK = holds_PE.argmax(0)[ids_TK]
    # As much as balance allows: 1.0 of 12.8 actors per token less than without copies.
    assert fan_out(ReplicaChoice(holds_PE).assign(ids_TK)) < fan_out(home_TK) - 0.7


@pytest.mark.parametrize("actors", [3, 5])
def test_few_rows_go_to_few_actors_and_take_turns(actors: int) -> None:
    rng = np.random.default_rng(4)
    holds_PE = np.zeros((actors, 32), bool)
    for expert in range(32):
        holds_PE[rng.permutation(actors)[:2], expert] = True
    choice, balanced = ReplicaChoice(holds_PE, few=8), ReplicaChoice(holds_PE, few=0)
    load_P, spread, least = np.zeros(actors), 0.0, 0.0
    for _ in range(400):
        ids_TK = choose(rng, np.ones(32), 8, 8)
        load_P += served_by(choice, holds_PE, ids_TK)
        spread += fan_out(balanced.assign(ids_TK))
        least += fan_out(choice.assign(ids_TK))
    assert least < 0.95 * spread
    assert load_P.max() / load_P.mean() < 1.25  # no actor is preferred for its number


def test_chords_take_the_load_off_by_the_shortest_ways() -> None:
    rng = np.random.default_rng(5)
    holds_PE = np.hstack([np.eye(12, dtype=bool), *(
        np.eye(12, dtype=bool) | np.roll(np.eye(12, dtype=bool), step, axis=0) for step in (1, 5)
    )])  # fmt: skip
    graph = replica_graph(holds_PE)
    assert (len(graph.rings), len(graph.chords), len(graph.wide)) == (1, 12, 0)
    load_P = rng.integers(900, 1100, 12)
    flow_H = graph.pull_HP @ (load_P - load_P.mean()) / PULL
    ends = np.array([graph.holders[index] for index in graph.chords])
    after_P = load_P - np.bincount(ends[:, 0], flow_H, 12) + np.bincount(ends[:, 1], flow_H, 12)
    assert after_P.std() < load_P.std()  # the ring carries the rest


def test_augmenting_alone_finds_the_optimum_from_any_start() -> None:
    rng = np.random.default_rng(6)
    for _ in range(50):
        holds_PE = rng.random((6, 12)) < 0.4
        holds_PE[0] |= ~holds_PE.any(0)
        counts_E = rng.integers(0, 30, 12)
        graph = replica_graph(holds_PE)
        counts = np.bincount(graph.code_E, counts_E, 6 + len(graph.holders)).astype(int).tolist()
        load, served = counts[:6], [0] * len(graph.actor)
        for copy, total in zip(graph.first, counts[6:], strict=True):
            served[copy] = total  # all on the first holder
            load[graph.actor[copy]] += total
        assert augment(graph, load, served, 0) == max(load) == by_subsets(holds_PE, counts_E)
