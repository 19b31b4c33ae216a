"""Deleted sessions: no request that came before brings one back, wherever it ends."""

import pytest

from expertmesh.actors.state.deleted import EACH, Deleted
from expertmesh.actors.state.sessions import SWEEP_S
from tests.support.session_replica import CONVERSATION, Replica
from tests.support.session_store import FakeDisk

LONGER = [*CONVERSATION, *range(60)]


@pytest.mark.parametrize("with_disk", [True, False], ids=["disk", "memory"])
def test_who_came_before_the_deletion_does_not_bring_it_back(with_disk: bool) -> None:
    """Not in the replica that has served it, nor in an heir that has only been told of the end."""
    disk = FakeDisk() if with_disk else None
    replicas = [Replica(disk), Replica(disk)]
    replicas[0].turn("s")
    for replica in replicas:
        replica.now = 1010.0
        replica.ask("delete", "s")
    for replica in replicas:
        replica.turn("s", LONGER, arrived=1009.0, saved=False)
        replica.turn("s", LONGER, arrived=1010.0, saved=False)
        replica.turn("other", arrived=1009.0)
        replica.turn("s", tenant="b/", arrived=1009.0)
        assert [view.session_id for view in replica.ask("list")] == ["other"]
    replicas[1].turn("s", LONGER, arrived=1010.1)
    assert replicas[1].ask("show", "s").tokens == len(LONGER)
    replicas[1].turn("s", [*LONGER, 1, 2], arrived=1009.0, saved=False)  # of the one before
    assert replicas[1].ask("show", "s").tokens == len(LONGER)


def test_an_heir_that_was_away_reads_it_on_the_disk(disk: FakeDisk) -> None:
    one, heir = Replica(disk), Replica(disk)
    one.turn("s")
    one.now = 1010.0
    assert one.ask("delete", "s") == "s"
    heir.now = 990.0  # another clock
    assert heir.claim("s", [*CONVERSATION, 1]) is None
    heir.turn("s", LONGER, arrived=1009.0, saved=False)
    assert heir.ask("list") == one.ask("list") == []
    heir.turn("s", LONGER, arrived=1011.0)
    assert [view.session_id for view in one.ask("list")] == ["s"]


def test_what_is_known_of_deleted_sessions_is_bounded(disk: FakeDisk) -> None:
    replica = Replica(disk, sessions_per_tenant=1)
    for number in range(EACH):
        assert not replica.sessions.full("a/", f"s{number}")
        replica.turn(f"s{number}")
        assert "delete one" in replica.sessions.full("a/salt", "t")
        replica.ask("delete", f"s{number}")
    assert replica.sessions.full("a/", "t").startswith(f"{EACH} sessions were deleted lately")
    assert not replica.sessions.full("b/", "t")
    replica.turn("t", saved=False)
    assert len(replica.sessions._entries) == EACH
    # Once more under a name that is known, or when they are so old that nobody has them any more.
    replica.sessions._count("a/", "s0", True)
    assert not replica.sessions.full("a/", "s0")
    replica.sessions._count("a/", "s0", False)
    replica.now += replica.sessions.settings.session_ttl_s
    replica.sessions.sweep()
    assert not replica.sessions.full("a/", "t") and not replica.sessions._entries
    assert not replica.sessions._buried and not disk.items.keys() & disk.pinned
    replica.turn("t")


def test_the_same_name_again_and_again_is_one(disk: FakeDisk) -> None:
    replica = Replica(disk, sessions_per_tenant=1)
    for _ in range(EACH * 2):
        replica.turn("s")
        replica.ask("delete", "s")
        replica.now += 1
    assert replica.sessions._buried == {"a": 1}
    replica.turn("s")
    assert not replica.sessions._buried


def test_deletions_are_forgotten_by_age_and_by_number_of_their_owner() -> None:
    known = Deleted(most=3, keep_s=100.0)
    for at, name in enumerate("abcd"):
        known.note("x", name, 10.0 + at)
    known.note("y", "a", 5.0)
    assert [name for name in "abcd" if known.since("x", name, 10.0)] == ["b", "c", "d"]
    known.note("x", "b", 20.0)  # the latest now
    known.note("x", "b", 19.0)  # told late
    known.note("x", "e", 14.0)
    assert [name for name in "abcde" if known.since("x", name, 0.0)] == ["b", "d", "e"]
    assert known.since("x", "b", 20.0) and not known.since("x", "b", 20.5)
    assert known.since("y", "a", 5.0) and not known.since("z", "a", 0.0)
    known.sweep(105.0)
    assert not known.since("y", "a", 5.0) and known.since("x", "d", 0.0)
    known.sweep(1000.0)
    assert not known._at


def test_a_sweep_forgets_them() -> None:
    replica = Replica(None, session_ttl_s=2 * SWEEP_S)
    replica.ask("delete", "s")
    replica.turn("s", arrived=999.0, saved=False)
    replica.now += 2 * SWEEP_S
    replica.sessions.sweep()
    replica.turn("s", arrived=999.0)


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()
