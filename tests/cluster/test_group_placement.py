import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cluster.groups.place import place_groups
from expertmesh.cluster.groups.types import Groups, contiguous_groups
from expertmesh.cluster.placement import PlacementError, contiguous_placement


def random_groups(seed: int, experts: int, count: int) -> Groups:
    rng = np.random.default_rng(seed)
    of = {layer: rng.permutation(experts) % count for layer in (1, 2)}
    return Groups(of, count)


@given(experts=st.integers(2, 40), seed=st.integers(0, 20), data=st.data())
def test_every_expert_gets_one_place(experts: int, seed: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, experts))
    actors = data.draw(st.integers(1, experts))
    slots = -(-experts // actors)
    loads = np.random.default_rng(seed).lognormal(0, 1, (2, experts)) if seed % 2 else None
    placement = place_groups(random_groups(seed, experts, count), loads, actors, slots)
    for layer in (1, 2):
        held = placement.held[layer]
        assert sorted(itertools.chain(*held)) == list(range(experts))
        assert 1 <= min(map(len, held)) <= max(map(len, held)) <= slots


def test_as_many_actors_as_groups_take_one_each() -> None:
    groups = random_groups(3, 24, 4)
    assert place_groups(groups, np.ones((2, 24)), 4, 8).held == {
        layer: groups.members(layer) for layer in (1, 2)
    }
    alike = contiguous_groups((1, 2), 23, 4)
    assert place_groups(alike, None, 4, 6) == contiguous_placement((1, 2), 23, 4)


def test_fewer_actors_take_whole_groups() -> None:
    groups = random_groups(1, 24, 8)
    held = place_groups(groups, None, 4, 6).held[1]
    for members in groups.members(1):
        assert sum(not set(members).isdisjoint(ids) for ids in held) == 1


def test_packed_groups_are_evened_out() -> None:
    loads = np.random.default_rng(0).lognormal(0, 0.45, (2, 96))
    placement = place_groups(random_groups(0, 96, 12), loads, 4, 24)
    for index, layer in enumerate((1, 2)):
        load = [loads[index, list(ids)].sum() for ids in placement.held[layer]]
        assert max(load) / np.mean(load) <= 1.021


def test_too_few_slots_are_refused_with_the_number_needed() -> None:
    with pytest.raises(PlacementError, match=r"layer 1.*5 slots.*at least 6"):
        place_groups(contiguous_groups((1,), 24, 4), None, 4, 5)
