import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cluster.placement import PlacementError, contiguous_placement


@given(experts=st.integers(1, 900), data=st.data())
def test_every_expert_lives_in_exactly_one_place(experts: int, data: st.DataObject) -> None:
    actors = data.draw(st.integers(1, experts))
    placement = contiguous_placement((1, 3), experts, actors)
    for layer in (1, 3):
        held = placement.held[layer]
        assert [e for ids in held for e in ids] == list(range(experts))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        assert min(map(len, held)) >= 1
    assert placement.actors == actors
    assert placement.of_actor(0) == {1: held[0], 3: held[0]}


@pytest.mark.parametrize("actors", [0, -1, 8, 10_000])
def test_impossible_numbers_are_refused_with_the_possible_ones(actors: int) -> None:
    with pytest.raises(PlacementError, match=r"7 experts.*1 to 7"):
        contiguous_placement((1,), 7, actors)
