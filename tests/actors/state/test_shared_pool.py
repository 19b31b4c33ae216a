"""Pages with several readers: nothing is written twice, lost, or forgotten while it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.state.pages import OwnershipError, SharedPool


def pool_of(size: int) -> tuple[SharedPool, list[int]]:
    lost: list[int] = []
    return SharedPool("page", size, lost.append), lost


def test_known_pages_lie_idle_and_are_forgotten_last_page_first() -> None:
    pool, lost = pool_of(4)
    mine = pool.take(1, 3)
    for page in mine:
        pool.keep(page)
    pool.give_back(1, mine)
    assert (pool.free, pool.idle) == (4, 3)
    pool.take(2, 2)  # the one that never was used, then the end of the prefix
    assert lost == [mine[2]]
    pool.share(3, mine[:2])
    assert pool.free == 0
    with pytest.raises(OwnershipError):
        pool.take(4, 1)
    pool.check()


def test_a_page_is_free_when_its_last_reader_has_gone() -> None:
    pool, lost = pool_of(2)
    (page,) = pool.take(1, 1)
    assert pool.alone(1, page) and pool.would_free(1, [page]) == 1
    pool.keep(page)
    pool.share(2, [page])
    assert not pool.alone(1, page) and pool.would_free(1, [page]) == 0
    pool.forget(page)
    pool.give_back(1, [page])
    assert pool.free == 1 and pool.owned_by(2) == [page]
    pool.give_back(2, [page])
    assert (pool.free, pool.idle, lost) == (2, 0, [])


def test_wrong_hands_are_refused() -> None:
    pool, _ = pool_of(3)
    (page,) = pool.take(1, 1)
    with pytest.raises(OwnershipError, match="cannot share"):
        pool.share(2, [page])  # nobody knows what it holds yet
    with pytest.raises(OwnershipError, match="has it not"):
        pool.give_back(2, [page])
    with pytest.raises(OwnershipError, match="belongs to nobody"):
        pool.keep(2 - page)
    pool.keep(page)
    with pytest.raises(OwnershipError, match="cannot share"):
        pool.share(1, [page])  # twice
    pool.give_back(1, [page])
    with pytest.raises(OwnershipError, match="has it not"):
        pool.give_back(1, [page])


MOVES = st.lists(st.tuples(st.sampled_from("tsgkf"), st.integers(0, 3), st.integers(0, 5)))


@given(MOVES)
def test_books_add_up(moves: list[tuple[str, int, int]]) -> None:
    pool, lost = pool_of(6)
    held: dict[int, list[int]] = {owner: [] for owner in range(4)}
    known: set[int] = set()
    for move, owner, number in moves:
        if move == "t" and number <= pool.free:
            taken = pool.take(owner, number)
            known -= set(lost)
            lost.clear()
            assert not known.intersection(taken)
            assert not any(page in pages for pages in held.values() for page in taken)
            held[owner] += taken
        elif move == "s" and number in known and number not in held[owner]:
            pool.share(owner, [number])
            held[owner].append(number)
        elif move == "g":
            pool.give_back(owner, held[owner])
            held[owner] = []
        elif move == "k" and any(number in pages for pages in held.values()):
            pool.keep(number)
            known.add(number)
        elif move == "f" and number in known:
            pool.forget(number)
            known.discard(number)
        pool.check()
        used = {page for pages in held.values() for page in pages}
        assert pool.free == 6 - len(used)
        assert pool.idle == len(known - used)
