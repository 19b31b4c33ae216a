"""Grouping experts: exact counts, exact sizes, even loads, and fewer actors per token."""

import itertools
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.groups import graph
from expertmesh.cluster.groups.fan_out import fan_out, imbalance
from expertmesh.cluster.groups.partition import (
    GroupSettings,
    exact_sizes,
    groups_from_recording,
    groups_from_routers,
    partition,
)
from expertmesh.cluster.groups.refine import _values, even_loads
from expertmesh.cluster.groups.routers import router_weights
from expertmesh.cluster.groups.types import contiguous, contiguous_groups
from expertmesh.cluster.ledger.recording import Recording
from expertmesh.cluster.placement import PlacementError
from tests.support.checkpoints import write_checkpoint
from tests.support.coactivated import Traffic, gini, hits

TRAFFIC = Traffic(experts=128, top_k=8, topics=16, domains=4)
TOKENS = 40_000


def recording(trace_NLK: np.ndarray, experts: int, layers: tuple[int, ...]) -> Recording:
    hits_LE = np.stack([hits(trace_NLK[:, i], experts) for i in range(len(layers))])
    none = np.zeros((len(layers), 0, experts), bool)
    return Recording(layers, experts, trace_NLK.shape[2], 1.0, hits_LE, trace_NLK, none)


def random_graph(rng: np.random.Generator, experts: int) -> np.ndarray:
    upper = np.triu(rng.random((experts, experts)) * (rng.random((experts, experts)) < 0.5), 1)
    return upper + upper.T


def test_pairs_are_counted_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "CHUNK", 7)  # not a divisor of the number of tokens
    ids_NK = Traffic(experts=11, top_k=3, topics=3, domains=1).tokens(50)
    expected = np.zeros((11, 11), np.int64)
    for token in ids_NK.tolist():
        for a, b in itertools.permutations(token, 2):
            expected[a, b] += 1
    assert (graph.together(ids_NK, 11) == expected).all()


def test_independent_choices_make_hardly_an_edge() -> None:
    strangers = Traffic(experts=32, top_k=4, topics=4, domains=2, topic=0.0, domain=0.0)
    friends = Traffic(experts=32, top_k=4, topics=4, domains=2)
    edges = [
        graph.beyond_chance(pairs := graph.together(t.tokens(20_000), 32)).sum() / pairs.sum()
        for t in (strangers, friends)
    ]
    assert edges[0] < 0.06  # not 0: no token chooses an expert twice
    assert edges[1] > 0.25
    assert not graph.beyond_chance(np.zeros((5, 5), np.int64)).any()


@given(experts=st.integers(2, 40), data=st.data())
def test_any_graph_gives_parts_of_exact_size(experts: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    edges, load_E = random_graph(rng, experts), rng.lognormal(0, 1, experts)
    part_E = partition(edges, load_E, count, GroupSettings())
    sizes = np.bincount(part_E, minlength=count)
    assert len(sizes) == count
    assert sizes.max() - sizes.min() <= 1
    assert (partition(edges, load_E, count, GroupSettings()) == part_E).all()


def test_sizes_are_repaired_by_what_costs_least() -> None:
    edges = np.zeros((6, 6))
    for a, b, weight in ((0, 1, 5), (0, 2, 5), (1, 2, 5), (0, 3, 1), (3, 4, 2), (4, 5, 9)):
        edges[a, b] = edges[b, a] = weight
    # Expert 3 hangs least on the others of its part.
    assert exact_sizes(np.array([0, 0, 0, 0, 1, 1]), edges, 2).tolist() == [0, 0, 0, 1, 1, 1]


def test_value_of_a_swap_is_what_the_swap_changes() -> None:
    rng = np.random.default_rng(5)
    edges, share_E, parts, cap, price = random_graph(rng, 12), rng.random(12), 3, 1.1, 0.7
    share_E *= parts / share_E.sum()
    part_E = rng.permutation(12) % parts

    def cost(part_E: np.ndarray) -> float:
        inside = edges[part_E[:, None] == part_E[None, :]].sum() / 2
        load = np.bincount(part_E, weights=share_E, minlength=parts)
        return price * float(np.maximum(load - cap, 0).sum()) - float(inside)

    value_EE = _values(part_E, edges.astype(np.float32), share_E, parts, cap, price)
    for a, b in itertools.combinations(range(12), 2):
        if part_E[a] != part_E[b]:
            swapped = part_E.copy()
            swapped[a], swapped[b] = part_E[b], part_E[a]
            assert value_EE[a, b] == pytest.approx(cost(part_E) - cost(swapped), abs=1e-5)


@given(seed=st.integers(0, 50))
def test_loads_end_even_where_swaps_can_make_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load_E = rng.lognormal(0.0, 0.45, 128)
    start = contiguous(128, 8)
    part_E = even_loads(start, np.zeros((128, 128)), load_E, 8, 1.02)
    loads = np.bincount(part_E, weights=load_E)
    assert loads.max() / loads.mean() <= 1.02 + 1e-3
    assert (np.bincount(part_E) == 16).all()
    assert (start == contiguous(128, 8)).all()


def test_an_expert_hotter_than_a_group_may_be_still_ends() -> None:
    load_E = np.ones(16)
    load_E[3] = 100.0
    part_E = even_loads(contiguous(16, 4), np.zeros((16, 16)), load_E, 4, 1.02)
    assert (np.bincount(part_E) == 4).all()


def test_two_halves_cut_no_more_than_kernighan_and_lin() -> None:
    """networkx's bisection as the oracle; the best of ten starts of it."""
    rng = np.random.default_rng(1)
    edges = np.rint(random_graph(rng, 40) * 100)
    ours = partition(edges, np.ones(40), 2, GroupSettings())
    cut = edges[ours[:, None] != ours[None, :]].sum() / 2
    network = nx.from_numpy_array(edges)
    cuts = [
        nx.cut_size(network, *nx.community.kernighan_lin_bisection(network, seed=seed), "weight")
        for seed in range(10)
    ]
    assert cut <= min(cuts) * 1.02


def test_fan_out_and_imbalance_as_by_hand() -> None:
    ids_NK = np.array([[0, 1], [0, 3], [2, 3]])
    assert fan_out(ids_NK, np.array([0, 0, 1, 1])) == pytest.approx(4 / 3)
    assert imbalance(ids_NK, np.array([0, 0, 1, 1]), 2) == 1.0
    assert imbalance(ids_NK, np.array([0, 1, 1, 1]), 2) == pytest.approx(4 / 3)
    assert imbalance(ids_NK[:0], np.array([0, 0, 1, 1]), 2) == 1.0


@pytest.mark.parametrize("actors", [8, 16])
def test_coactivated_traffic_reaches_a_fifth_fewer_actors(actors: int) -> None:
    """On tokens that the groups were not made from, at a load imbalance of at most 1.05."""
    trace = TRAFFIC.tokens(2 * TOKENS)[:, None]
    seen, later = trace[:TOKENS], trace[TOKENS:, 0]
    assert 0.24 <= gini(hits(later, 128)) <= 0.38
    group_E = groups_from_recording(recording(seen, 128, (1,)), actors).of[1]
    neighbours = fan_out(later, contiguous(128, actors))
    assert fan_out(later, group_E) <= 0.8 * neighbours
    assert imbalance(later, group_E, actors) <= 1.05
    assert np.bincount(group_E).tolist() == [128 // actors] * actors


def test_where_nothing_belongs_together_nothing_is_claimed() -> None:
    traffic = Traffic(experts=64, top_k=4, topics=4, domains=2, topic=0.0, domain=0.0)
    trace = traffic.tokens(20_000)[:, None]
    group_E = groups_from_recording(recording(trace[:10_000], 64, (0,)), 8).of[0]
    later = trace[10_000:, 0]
    ratio = fan_out(later, group_E) / fan_out(later, contiguous(64, 8))
    assert ratio == pytest.approx(1.0, abs=0.02)
    assert imbalance(later, group_E, 8) <= 1.05


def test_each_layer_has_its_own_groups_and_a_silent_one_the_contiguous() -> None:
    traffic = Traffic(experts=24, top_k=3, topics=4, domains=2)
    one, other = traffic.tokens(3000), Traffic(24, 3, 4, 2, seed=9).tokens(3000)
    made = recording(np.stack([one, other], axis=1), 24, (3, 7))
    groups = groups_from_recording(made, 4)
    assert set(groups.of) == {3, 7}
    assert (groups.of[3] != groups.of[7]).any()
    assert sorted(itertools.chain(*groups.members(3))) == list(range(24))
    silent = recording(made.trace_NLK[:0], 24, (3, 7))
    assert groups_from_recording(silent, 4).members(7) == contiguous_groups((7,), 24, 4).members(7)
    with pytest.raises(PlacementError, match=r"1 to 24"):
        groups_from_recording(made, 25)


def test_routers_that_point_the_same_way_group_their_experts() -> None:
    rng = np.random.default_rng(2)
    family_E = rng.permutation(24) % 4
    rows = rng.normal(size=(4, 32))[family_E] + 0.5 * rng.normal(size=(24, 32))
    group_E = groups_from_routers({2: rows.astype(np.float32)}, 4).of[2]
    families = {tuple(np.flatnonzero(family_E == f)) for f in range(4)}
    assert {tuple(np.flatnonzero(group_E == g)) for g in range(4)} == families


def test_routers_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    opened = LoadSettings(model=write_checkpoint(tmp_path / "m", num_experts=7)).open()
    weights = router_weights(opened)
    assert tuple(weights) == opened.config.moe_layers
    assert {w.shape for w in weights.values()} == {(7, opened.config.hidden_size)}
    assert all(len(set(group_E)) == 3 for group_E in groups_from_routers(weights, 3).of.values())
