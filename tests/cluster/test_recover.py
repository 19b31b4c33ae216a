import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.cluster.balancing.recovery import NoCapacity, recover
from expertmesh.cluster.placement import Placement, contiguous_placement


def with_spares(layers: tuple[int, ...], experts: int, actors: int, slots: int) -> Placement:
    """Contiguous, then each actor also holds the first experts of the next ones."""
    base = contiguous_placement(layers, experts, actors).held[layers[0]]
    following = [
        [e for k in range(1, actors) for e in base[(a + k) % actors]] for a in range(actors)
    ]
    rows = tuple(
        ids + tuple(more[: slots - len(ids)]) for ids, more in zip(base, following, strict=True)
    )
    return Placement(dict.fromkeys(layers, rows))


@given(
    experts=st.integers(1, 40),
    actors=st.integers(1, 6),
    spare=st.integers(0, 12),
    data=st.data(),
)
def test_every_expert_is_held_or_the_refusal_counts_those_without_room(
    experts: int, actors: int, spare: int, data: st.DataObject
) -> None:
    actors = min(actors, experts)
    slots = min(-(-experts // actors) + spare, experts)
    old = with_spares((1, 4), experts, actors, slots)
    lost = data.draw(st.frozensets(st.integers(0, actors - 1)))
    left = [actor for actor in range(actors) if actor not in lost]
    if len(left) * slots < experts:
        short = experts - len(left) * slots
        with pytest.raises(NoCapacity, match=rf"^{short} of {experts} experts per layer"):
            recover(old, lost, slots)
        return
    recovery = recover(old, lost, slots)
    assert recovery == recover(old, lost, slots)
    assert recovery.survivors == tuple(left)
    for layer, rows in recovery.placement.held.items():
        assert {e for ids in rows for e in ids} == set(range(experts))
        for actor, (ids, was) in enumerate(zip(rows, left, strict=True)):
            assert len(ids) == len(set(ids)) <= slots
            gained = set(ids) - set(old.held[layer][was])
            gone = set(old.held[layer][was]) - set(ids)
            assert gained == set(recovery.loads.get(actor, {}).get(layer, ()))
            assert gone == set(recovery.drops.get(actor, {}).get(layer, ()))
            # Only what no survivor holds is loaded.
            assert not gained & {e for a in left for e in old.held[layer][a]}
    orphans = sum(len(ids) for layers in recovery.loads.values() for ids in layers.values())
    assert recovery.orphans == orphans


def test_orphans_are_spread_over_the_survivors() -> None:
    old = with_spares((1,), 12, 4, 5)
    recovery = recover(old, frozenset({0}), 5)
    counts = [len(recovery.loads.get(actor, {}).get(1, ())) for actor in range(3)]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("deaths", [1, 2, 4])
def test_the_spare_slots_of_a_large_mesh_absorb_four_deaths(deaths: int) -> None:
    old = with_spares((1, 2), 896, 64, 15)
    recovery = recover(old, frozenset(range(deaths)), 15)
    for rows in recovery.placement.held.values():
        assert {e for ids in rows for e in ids} == set(range(896))


def test_the_fifth_death_is_refused() -> None:
    old = with_spares((1,), 896, 64, 15)
    with pytest.raises(NoCapacity, match=r"11 of 896 experts.*59 expert actors.*15 slots.*60 are"):
        recover(old, frozenset(range(5)), 15)
