"""Whose load is next."""

from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.tiers.fetch import Loading, StoreFetch
from expertmesh.actors.state.tiers.turns import Turns


def fetch() -> StoreFetch:
    return StoreFetch((), True, 0.0, lambda: 0.0, lambda *_: None, lambda *_: None)


def loads(owner: StoreFetch, count: int) -> list[Loading]:
    return [Loading(Name(bytes([at]) * 32, Kind.PAGE), [(owner, at)], 10) for at in range(count)]


def taken(turns: Turns) -> list[Loading]:
    """One at a time."""
    return [load for [load] in iter(turns.take, [])]


def test_a_short_fetch_does_not_wait_for_a_long_one() -> None:
    turns, long, short = Turns(), fetch(), fetch()
    many, few = loads(long, 100), loads(short, 2)
    turns.add(long, many)
    turns.add(short, few)
    order = taken(turns)
    assert order[:4] == [many[0], few[0], many[1], few[1]]
    assert order[4:] == many[2:]
    assert len(turns) == 0


def test_a_shared_load_is_started_by_the_first_in_turn() -> None:
    turns, long, short = Turns(), fetch(), fetch()
    many = loads(long, 5)
    turns.add(long, many)
    many[4].waiters.append((short, 0))
    turns.add(short, [many[4]])
    assert taken(turns) == [many[0], many[4], *many[1:4]]  # once


def test_what_nobody_wants_any_more_is_skipped() -> None:
    turns, one = Turns(), fetch()
    items = loads(one, 3)
    turns.add(one, items)
    items[0].waiters.clear()
    items[2].waiters.clear()
    assert taken(turns) == [items[1]]
    turns.add(one, [])
    assert turns.take() == []


def test_a_turn_is_some_loads_of_one_fetch() -> None:
    turns, long, short = Turns(), fetch(), fetch()
    many, few = loads(long, 10), loads(short, 2)
    turns.add(long, many)
    turns.add(short, few)
    assert turns.take(4, enough=1000) == many[:4]
    assert turns.take(4, enough=1000) == few
    assert turns.take(4, enough=11) == many[4:6]  # 20 bytes are enough
    assert turns.take(4, enough=5) == many[6:7]
    assert turns.take(4, enough=1000) == many[7:]
    assert turns.take(4, enough=1000) == []
