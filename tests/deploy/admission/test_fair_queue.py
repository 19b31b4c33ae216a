"""The order of service: shares, priorities, ageing, and who gives way, over random histories."""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from expertmesh.deploy.admission.fair_queue import LEVELS, PATIENCE, FairQueue, Place

FLOWS = st.sampled_from("abcd")
COSTS = st.integers(1, 1000)
# None: serve one; an integer: take the waiting place of this index away; a tuple: an arrival.
ARRIVALS = st.tuples(FLOWS, st.integers(-2, 2), COSTS)
History = list[int | tuple[str, int, int] | None]
HISTORIES = st.lists(st.none() | st.integers(0, 99) | ARRIVALS, max_size=120)


def filled(*arrivals: tuple[str, int, int]) -> FairQueue[int]:
    queue: FairQueue[int] = FairQueue()
    for number, (flow, priority, cost) in enumerate(arrivals):
        queue.push(number, flow, priority, cost)
    return queue


@given(HISTORIES)
def test_everything_is_served_once_or_taken_away_and_in_order_within_a_flow(
    history: History,
) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, Place[int]] = {}
    for number, step in enumerate([*history, *[None] * len(history)]):
        if isinstance(step, tuple):
            waiting[number] = queue.push(number, *step)
        elif isinstance(step, int) and waiting:
            gone = waiting.pop(sorted(waiting)[step % len(waiting)])
            assert queue.remove(gone) and not queue.remove(gone)
        elif step is None and waiting:  # work conserving: whoever waits, somebody is served
            served = queue.pop()
            assert waiting.pop(served.item) is served
            assert not queue.remove(served)
            same = [p for p in waiting.values() if (p.flow, p.level) == (served.flow, served.level)]
            assert all(other.number > served.number for other in same)
        assert len(queue) == len(waiting)
        assert {place.item for place in queue} == set(waiting)
    while waiting:
        del waiting[queue.pop().item]
    assert len(queue) == 0


@given(st.lists(COSTS, min_size=1, max_size=60), st.lists(COSTS, min_size=1, max_size=60))
def test_two_backlogged_flows_get_equal_cost_to_within_one_request(
    first: list[int], second: list[int]
) -> None:
    queue = filled(*[("a", 0, cost) for cost in first], *[("b", 0, cost) for cost in second])
    got, left = Counter(a=0, b=0), Counter(a=len(first), b=len(second))
    while left["a"] and left["b"]:
        place = queue.pop()
        got[place.flow] += int(place.cost)
        left[place.flow] -= 1
        assert abs(got["a"] - got["b"]) <= max(*first, *second)


@given(HISTORIES, COSTS)
def test_a_flow_that_comes_waits_for_at_most_one_request_of_each_other(
    history: History, cost: int
) -> None:
    """However long the others' backlogs are, and whatever they have been given before."""
    queue: FairQueue[str] = FairQueue()
    for step in history:
        if isinstance(step, tuple):
            queue.push("other", step[0], 0, step[2])
        elif len(queue):
            queue.pop()
    others = len({place.flow for place in queue})
    queue.push("light", "light", 0, cost)
    served = [queue.pop().item for _ in range(others + 1)]
    assert "light" in served


def test_whoever_was_idle_has_saved_nothing_up() -> None:
    queue = filled(*[("busy", 0, 10)] * 40)
    for _ in range(20):
        queue.pop()
    for number in range(20):
        queue.push(100 + number, "idle", 0, 10)
    flows = [queue.pop().flow for _ in range(20)]
    assert Counter(flows) == {"busy": 10, "idle": 10}


def test_what_a_flow_was_given_counts_while_others_still_wait() -> None:
    """Its queue being empty for a moment does not make a flow new."""
    queue = filled(("big", 0, 100), *[("small", 0, 10)] * 12)
    assert queue.pop().flow == "big"
    queue.push(50, "big", 0, 100)
    assert [queue.pop().flow for _ in range(13)] == ["small"] * 11 + ["big", "small"]


def test_smaller_numbers_are_served_first() -> None:
    queue = filled(("a", 3, 1), ("a", 0, 1), ("b", -1, 9), ("a", 10**6, 1), ("c", -(10**6), 1))
    assert [queue.pop().item for _ in range(5)] == [4, 2, 1, 0, 3]


@given(st.lists(st.integers(-LEVELS, LEVELS), min_size=1, max_size=10, unique=True), st.data())
def test_every_class_that_waits_has_a_turn_within_the_bound(
    levels: list[int], data: st.DataObject
) -> None:
    """With more urgent requests arriving all the time, of any flow."""
    queue: FairQueue[int] = FairQueue()
    since = dict.fromkeys(levels, 0)
    for level in levels:
        queue.push(0, "a", level, 1)
    bound = PATIENCE + len(levels)
    arrivals = data.draw(st.lists(st.sampled_from(levels), min_size=1, max_size=8))
    supply = deque(arrivals)
    for _ in range(3 * bound):
        urgent = min([supply[0], *levels])
        supply.rotate()
        for level in {urgent, *levels}:  # nobody's class is ever empty
            queue.push(0, "ab"[level % 2], level, 5)
        served = queue.pop().level
        since = {level: turns + 1 for level, turns in since.items()} | {served: 0}
        assert max(since.values()) <= bound


def test_a_lone_request_of_low_priority_under_a_stream_of_urgent_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("low", "a", 5, 1000)
    served: list[str] = []
    while "low" not in served:
        queue.push("urgent", "b", -5, 1)
        served.append(queue.pop().item)
    assert len(served) == PATIENCE + 1


def test_in_a_full_queue_the_longest_flow_gives_way_with_its_newest() -> None:
    queue = filled(*[("flood", 0, 1)] * 9, ("flood", -1, 1), ("light", 0, 1))
    out = queue.who_gives_way("light", 0)
    assert out is not None and (out.flow, out.item) == ("flood", 8)
    assert queue.who_gives_way("new", 5) is out, "shares are between flows, not between priorities"
    assert queue.who_gives_way("flood", 0) is None, "it is the longest itself"
    assert queue.who_gives_way("flood", -1) is out, "but may put its own more urgent first"
    assert filled().who_gives_way("a", 0) is None
    assert filled(("a", 0, 1), ("b", 0, 1)).who_gives_way("b", 0) is None, "nothing to even out"
