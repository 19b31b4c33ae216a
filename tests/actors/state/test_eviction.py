"""Which snapshot goes first."""

from expertmesh.actors.state.eviction import RUNG, SUPERSEDED, SnapshotOrder


def order(*made: str, rungs: str = "") -> SnapshotOrder[str]:
    made_up = SnapshotOrder[str]()
    for name in made:
        made_up.tick()
        made_up.made(name, rung=name in rungs)
    return made_up


def test_nothing_to_evict() -> None:
    assert order().victim() is None


def test_the_one_longest_unused() -> None:
    one = order("a", "b", "c")
    assert one.victim() == "a"
    one.tick()
    one.used("a", deeper=False)
    assert one.victim() == "b"
    one.gone("b")
    assert one.victim() == "c" and len(one) == 2


def test_what_a_later_turn_has_left_behind_ages_faster() -> None:
    one = order("old", "turn")
    one.tick()
    one.used("turn", deeper=True)
    for _ in range(2):
        one.tick()
    assert one.victim() == "turn"  # 3 * 8 against 5
    one.used("turn", deeper=True)  # a second turn begins from it: conversations part here
    assert one.victim() == "old"


def test_a_superseded_one_outlives_what_is_far_older() -> None:
    one = order("old")
    for _ in range(4 * SUPERSEDED):
        one.tick()
    one.made("turn")
    one.used("turn", deeper=True)
    assert one.victim() == "old" and one.likely("old") and not one.likely("turn")


def test_rungs_age_fastest_until_one_is_used() -> None:
    one = order("old", "rung", rungs="rung")
    one.tick()
    assert one.victim() == "rung" and RUNG > SUPERSEDED and not one.likely("rung")
    one.used("rung", deeper=False)
    assert one.victim() == "old"
