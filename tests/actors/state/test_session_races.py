"""Sessions that change while they are read or written, and disks that fail meanwhile."""

import math
from typing import Any

import pytest

from expertmesh.actors.state.item import Kind
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.sessions import RETRIES, SWEEP_S
from tests.support.session_replica import CONVERSATION, Replica
from tests.support.session_store import FakeDisk

LONGER = [*CONVERSATION, *range(60)]


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


def begin(replica: Replica, verb: Any, target: str = "") -> list[SessionAnswer]:
    """The answer comes when `end` lets the store go on."""
    answers: list[SessionAnswer] = []
    replica.store.slow = True
    call = SessionCall(verb=verb, tenant="a/", session="s", target=target)
    replica.verbs.call(call, answers.append)
    assert not answers
    return answers


def end(replica: Replica) -> None:
    replica.store.slow = False
    for _ in range(20):
        replica.store.finish()
        replica.errands.poll()
    assert not len(replica.errands)


def manifests_on(disk: FakeDisk) -> int:
    return sum(name.kind is Kind.SESSION for name in disk.items)


@pytest.mark.parametrize("with_disk", [True, False])
def test_a_turn_that_ends_while_its_session_is_resumed_stays(with_disk: bool) -> None:
    replica = Replica(FakeDisk() if with_disk else None)
    replica.turn("s")
    answers = begin(replica, "resume")
    tip = replica.turn("s", LONGER)
    end(replica)
    assert [answer.problem for answer in answers] == ["busy"]
    assert all(fetch.cancelled for fetch in replica.store.held)
    assert replica.claim("s", [*LONGER, 1]) == tip
    assert all(replica.store.where(name) is not None for name in tip.names)
    assert replica.ask("resume", "s").restored_tokens == len(LONGER) - 1


def test_a_fork_is_of_the_state_that_its_origin_has(disk: FakeDisk) -> None:
    """Looking whether there is one already takes time, in which a turn of the origin may end."""
    replica, other = Replica(disk), Replica(disk)
    replica.turn("s")
    other.turn("t", LONGER)
    answers = begin(replica, "fork", "t")
    end(replica)
    assert [answer.problem for answer in answers] == ["exists"]
    other.ask("delete", "t")
    answers = begin(replica, "fork", "t")
    replica.turn("s", LONGER)
    end(replica)
    assert [answer.problem for answer in answers] == ["busy"]
    assert replica.ask("fork", "s", target="t").tokens == len(LONGER)


def test_a_fork_that_the_disk_does_not_take_is_none(disk: FakeDisk) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")
    replica.ask("suspend", "s")
    disk.room = len(disk.items)
    refused = replica.ask("fork", "s", target="t")
    assert refused.problem == "full" and "there is no fork" in refused.message
    assert replica.ask("show", "t").problem == "unknown"
    disk.room += 1
    assert replica.ask("fork", "s", target="t").tokens == len(CONVERSATION)
    assert all(replica.store.where(name) is not None for name in tip.names)


def test_a_failing_disk_does_not_keep_the_state_of_every_turn(disk: FakeDisk) -> None:
    replica, text, tips = Replica(disk), CONVERSATION, []
    for _ in range(6):
        tips.append(replica.turn("s", text))
        text = [*text, *range(5)]
        disk.broken = "io"
    pinned = set(tips[-1].names) | set(tips[0].names)  # the newest, and what the disk has
    assert {name for name in disk.pinned if name.kind is not Kind.SESSION} == pinned
    assert all(replica.store.where(name) is None for tip in tips[1:-1] for name in tip.end)


def test_a_disk_that_works_again_gets_what_it_has_missed(disk: FakeDisk) -> None:
    disk.broken = "io"
    replica = Replica(disk)
    for at in range(RETRIES + 2):
        replica.turn(f"s{at}")
    replica.sessions.sweep()
    assert not disk.items
    disk.broken = ""
    replica.now += SWEEP_S
    replica.sessions.sweep()
    assert manifests_on(disk) == RETRIES
    replica.now += SWEEP_S
    replica.sessions.sweep()
    assert manifests_on(disk) == RETRIES + 2
    again = Replica(disk)
    assert again.claim("s0", [*CONVERSATION, 1]).position == len(CONVERSATION) - 1


def test_a_claim_looks_at_one_name(disk: FakeDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")

    def scan(kind: Kind) -> Any:
        raise AssertionError("there may be a million")

    monkeypatch.setattr(replica.store, "position", lambda name: -1)
    monkeypatch.setattr(replica.store, "positions", scan)
    assert replica.claim("s", [*CONVERSATION, 1]) == tip


def test_tenants_that_have_left_leave_no_trace(disk: FakeDisk) -> None:
    replica = Replica(None, sessions_per_tenant=2)
    for at in range(50):
        replica.turn("s", tenant=f"a/{at}")
        replica.ask("delete", "s", tenant=f"a/{at}")
    assert len(replica.sessions) == 0 and not replica.sessions._of and not replica.sessions._owned


def test_a_load_that_is_expected_to_fail_ends_all_the_same(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may begin to work between the estimate and the load."""
    replica, limits = Replica(disk), []
    replica.turn("s")
    fetch = replica.store.fetch

    def noted(names: Any, timeout_s: float, exact: bool = True) -> Any:
        limits.append(timeout_s)
        return fetch(names, timeout_s, exact)

    monkeypatch.setattr(replica.store, "load_seconds", lambda names: math.inf)
    monkeypatch.setattr(replica.store, "fetch", noted)
    assert replica.ask("resume", "s").restored_tokens == len(CONVERSATION) - 1
    assert limits and all(map(math.isfinite, limits))
