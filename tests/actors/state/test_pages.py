import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.state.pages import NOBODY, OwnershipError, Pool, pages_for


@pytest.mark.parametrize(
    ("tokens", "pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)]
)
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages


def test_takes_and_gives_back() -> None:
    pool = Pool("page", 4)
    mine = pool.take(7, 3)
    assert len(set(mine)) == 3 and pool.free == 1
    assert pool.owned_by(7) == sorted(mine)
    pool.give_back(7, mine)
    assert pool.free == 4 and pool.owned_by(7) == []


def test_more_than_free_names_the_numbers() -> None:
    pool = Pool("page", 2)
    pool.take(1, 1)
    with pytest.raises(OwnershipError, match="asks for 2 pages, 1 are free"):
        pool.take(2, 2)
    assert pool.free == 1


def test_double_free_and_foreign_free_are_errors() -> None:
    pool = Pool("slot", 3)
    mine, other = pool.take(1, 1), pool.take(2, 1)
    with pytest.raises(OwnershipError, match="sequence 1 frees slot"):
        pool.give_back(1, other)
    pool.give_back(1, mine)
    with pytest.raises(OwnershipError):
        pool.give_back(1, mine)
    with pytest.raises(OwnershipError):
        pool.give_back(2, [other[0], other[0]])


def test_corrupt_free_list_is_noticed() -> None:
    pool = Pool("page", 2)
    mine = pool.take(1, 1)
    pool._free.append(mine[0])
    with pytest.raises(OwnershipError, match="free list"):
        pool.take(2, 2)


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="slots: 0"):
        Pool("slot", 0)


def test_compact_pool_hands_out_the_lowest() -> None:
    pool = Pool("slot", 5, compact=True)
    assert pool.take(1, 3) == [0, 1, 2]
    assert pool.take(2, 1) == [3]
    pool.give_back(1, [2, 0, 1])
    assert pool.take(3, 2) == [0, 1] and pool.take(4, 2) == [2, 4]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), st.booleans())
def test_every_number_has_one_owner(moves: list[tuple[int, int]], compact: bool) -> None:
    pool = Pool("page", 8, compact=compact)
    held: dict[int, list[int]] = {owner: [] for owner in range(4)}
    for owner, count in moves:
        if count <= pool.free:
            held[owner] += pool.take(owner, count)
        else:
            pool.give_back(owner, held[owner])
            held[owner] = []
        taken = [n for numbers in held.values() for n in numbers]
        assert len(taken) == len(set(taken)) and len(taken) + pool.free == 8
        for who, numbers in held.items():
            assert pool.owned_by(who) == sorted(numbers)
    assert NOBODY not in held
