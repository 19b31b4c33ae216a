"""Sessions over a store of dictionaries: what they hold, who may have them, what they survive."""

import time

import pytest

from expertmesh.actors.state.item import Kind
from expertmesh.actors.state.keys import root_key
from expertmesh.actors.state.manifest import from_bytes, session_name, to_item
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.sessions import HELD_S, READS
from expertmesh.actors.state.tip import Tip
from tests.support.session_replica import CONVERSATION, FINGERPRINT, Replica, item
from tests.support.session_store import FakeDisk, FakeFetch


@pytest.fixture
def disk() -> FakeDisk:
    return FakeDisk()


@pytest.mark.parametrize("with_disk", [False, True])
def test_a_turn_goes_on_from_the_last_one(with_disk: bool) -> None:
    replica = Replica(FakeDisk() if with_disk else None)
    tip = replica.turn("s")
    claimed = replica.claim("s", [*CONVERSATION, 9, 9])
    assert claimed == tip
    assert claimed.position == 149 and claimed.names == tip.names
    longer = [*CONVERSATION, *range(50)]
    replica.turn("s", longer)
    assert replica.claim("s", [*longer, 1]).position == len(longer) - 1
    assert replica.claim("s", [*CONVERSATION, 1]) is None  # the state cannot be wound back


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (CONVERSATION[:149], "no token is left to compute"),
        ([2, *CONVERSATION[1:], 5], "another first token"),
        ([*CONVERSATION[:148], 9, 9, 9], "another last token"),
        ([5], "shorter"),
    ],
)
def test_another_conversation_does_not_go_on(prompt: list[int], why: str) -> None:
    replica = Replica(None)
    replica.turn("s")
    assert replica.claim("s", prompt) is None, why
    assert replica.claim("s", [*CONVERSATION[:149], 77]) is not None  # 149 are in the state


def test_tenants_modes_and_models_do_not_meet(disk: FakeDisk) -> None:
    replica = Replica(disk)
    replica.turn("s", tenant="a/")
    prompt = [*CONVERSATION, 1]
    for verb in ("show", "suspend", "resume", "fork", "delete"):
        answer = replica.ask(verb, "s", tenant="b/", target="t")
        assert answer.problem == "unknown" and "'s'" in answer.message, verb
    assert replica.ask("list", tenant="b/") == []
    assert replica.claim("s", prompt, tenant="b/") is None
    assert replica.claim("s", prompt, mode="select") is None
    assert replica.claim("s", prompt) is not None
    replica.store.flush()
    other = Replica(disk)
    other.sessions.fingerprint = b"another model"
    assert other.ask("list") == [] and other.claim("s", prompt) is None


def test_suspended_means_on_disk_and_synced(disk: FakeDisk) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")
    report = replica.ask("suspend", "s")
    assert (report.tokens, report.pages) == (150, 3) and report.bytes > 0
    needed = {*tip.names, replica.sessions.name("a/", "s")}
    assert needed <= disk.items.keys() and needed - {session_name(FINGERPRINT, "a/", "s")} <= (
        disk.pinned
    )
    again = Replica(disk)  # SIGKILL, and a new process
    (view,) = again.ask("list")
    assert view.status == "suspended" and (view.tokens, view.position) == (150, 149)
    assert view.seed == 3 and view.created == view.used == 1000.0
    shown, before = again.ask("show", "s"), replica.ask("show", "s").resident
    assert shown.missing == 0 and set(shown.resident) == {"disk"}
    assert before == {"host": shown.resident["disk"], "disk": shown.resident["disk"]}
    resumed = again.ask("resume", "s")
    assert (resumed.restored_tokens, resumed.recomputed_tokens) == (149, 0)
    assert resumed.tier == "disk" and resumed.bytes > 0 and resumed.verify_ms == 250.0
    assert resumed.reason == "" and again.ask("show", "s").status == "active"
    assert again.claim("s", [*CONVERSATION, 1]) == tip


def test_a_kill_at_any_moment_leaves_the_newest_whole_state(disk: FakeDisk) -> None:
    """Before the first sync there is nothing; between any two, one turn or the next, whole."""
    replica = Replica(disk)
    replica.store.slow = True
    longer = [*CONVERSATION, *range(60)]
    wanted = [None, None, 149, 149, 149, 209]
    for moment, position in enumerate(wanted):
        if moment == 0:
            replica.turn("s")
        elif moment == 3:
            replica.turn("s", longer)
        restarted = Replica(FakeDisk(dict(disk.items)))  # what is written and not synced is gone
        claimed = [restarted.claim("s", [*text, 1]) for text in (CONVERSATION, longer)]
        whole = [tip for tip in claimed if tip is not None]
        for tip in whole:
            assert all(name in disk.items for name in tip.names), moment
        assert (whole[-1].position if whole else None) == position, moment
        replica.store.finish()
        replica.errands.poll()
    assert not len(replica.errands)


def test_an_engine_that_ends_leaves_what_its_turns_have_made(disk: FakeDisk) -> None:
    replica = Replica(disk)
    replica.store.slow = True
    replica.turn("s")
    replica.sessions.hand_over()
    replica.errands.close(RuntimeError("the engine was stopped"))
    disk.sync()  # the store is closed behind the engine
    assert Replica(disk).claim("s", [*CONVERSATION, 1]).position == 149


def test_many_sessions_are_read_a_few_at_a_time(disk: FakeDisk) -> None:
    replica = Replica(disk)
    for number in range(2 * READS + 3):
        replica.turn(f"s{number}", [number] * 65)
    again = Replica(disk)
    again.store.slow = True
    answers: list[SessionAnswer] = []
    again.verbs.call(SessionCall(verb="list", tenant="a/"), answers.append)
    while not answers:
        assert len(again.store.waiting) <= READS
        again.store.finish()
        again.errands.poll()
    assert answers[0].views is not None and len(answers[0].views) == 2 * READS + 3
    assert len(again.sessions) == 2 * READS + 3 and disk.pinned


def test_turns_faster_than_the_disk(disk: FakeDisk) -> None:
    replica = Replica(disk)
    replica.store.slow = True
    tips = [replica.turn("s", [*CONVERSATION, *range(n)]) for n in range(4)]
    while len(replica.errands):
        replica.store.finish()
        replica.errands.poll()
    assert Replica(disk).ask("show", "s").tokens == 153
    assert disk.pinned == {*tips[-1].names}
    assert not {name for tip in tips[:-1] for name in tip.end} & disk.items.keys()


def test_a_turn_that_ends_while_its_session_is_suspended(disk: FakeDisk) -> None:
    replica = Replica(disk)
    replica.turn("s")
    replica.store.slow = True
    answers: list[SessionAnswer] = []
    replica.verbs.call(SessionCall(verb="suspend", tenant="a/", session="s"), answers.append)
    replica.turn("s", [*CONVERSATION, 1, 2])
    while len(replica.errands):
        replica.store.finish()
        replica.errands.poll()
    assert answers[0].problem == "busy" and "not suspended" in answers[0].message
    replica.store.slow = False
    assert replica.ask("show", "s").status == "active"
    assert replica.ask("suspend", "s").tokens == 152


def test_without_a_disk_nothing_is_suspended_and_nothing_pretends() -> None:
    replica = Replica(None)
    replica.turn("s")
    answer = replica.ask("suspend", "s")
    assert answer.problem == "no_disk" and "--state-dir" in answer.message
    assert replica.ask("show", "s").status == "active"
    assert not replica.store.disk.items | replica.store.disk.written


def test_pages_that_only_the_device_has_are_saved_from_there(disk: FakeDisk) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")
    replica.store.drop(tip.names)
    answer = replica.ask("suspend", "s")
    assert answer.problem == "lost" and "computes it again" in answer.message
    replica.device.there = {name: item(name, 0, ()) for name in tip.names}
    assert replica.ask("suspend", "s").tokens == 150
    assert disk.items.keys() >= set(tip.names)


@pytest.mark.parametrize("reason", ["full", "timeout", "io"])
def test_a_disk_that_does_not_take_it_is_told(disk: FakeDisk, reason: str) -> None:
    replica = Replica(disk)
    replica.turn("s")
    disk.broken = reason
    answer = replica.ask("suspend", "s")
    assert answer.problem == (reason if reason != "io" else "failed")
    assert "not suspended" in answer.message
    assert replica.ask("show", "s").status == "active"
    disk.broken, disk.room = "", 0
    assert replica.ask("suspend", "s").problem == "full"


def test_resume_says_when_it_restored_nothing(disk: FakeDisk) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")
    replica.ask("suspend", "s")
    again = Replica(disk)
    again.store.lost = {tip.names[1]}  # damaged, say
    report = again.ask("resume", "s")
    assert (report.restored_tokens, report.recomputed_tokens) == (0, 149)
    assert report.tier == "" and report.bytes == 0 and "missing" in report.reason
    assert again.ask("show", "s").status == "suspended"


def test_what_is_on_the_device_need_not_be_read() -> None:
    replica = Replica(None)
    tip = replica.turn("s")
    replica.device.there = {name: item(name, 0, ()) for name in tip.names}
    replica.store.drop(tip.names)
    report = replica.ask("resume", "s")
    assert (report.restored_tokens, report.tier, report.bytes) == (149, "hot", 0)
    assert set(replica.ask("show", "s").resident) == {"hot"}


def test_a_resumed_state_is_held_for_the_next_request_and_no_longer(disk: FakeDisk) -> None:
    replica = Replica(disk)
    replica.turn("s")
    replica.ask("resume", "s")
    held: FakeFetch = replica.store.held[-1]
    assert not held.cancelled
    replica.now += HELD_S / 2
    replica.sessions.sweep()
    assert not held.cancelled
    replica.turn("s", [*CONVERSATION, 4])
    assert held.cancelled
    replica.ask("resume", "s")
    replica.now += HELD_S
    replica.sessions.sweep()
    assert all(fetch.cancelled for fetch in replica.store.held if fetch.items)


def test_a_fork_shares_pages_and_outlives_its_origin(disk: FakeDisk) -> None:
    replica = Replica(disk)
    tip = replica.turn("s")
    replica.ask("suspend", "s")
    before = set(disk.items)
    fork = replica.ask("fork", "s", target="t")
    assert fork.session_id == "t" and fork.status == "suspended" and fork.tokens == 150
    assert disk.items.keys() - before == {replica.sessions.name("a/", "t")}
    assert replica.ask("fork", "s", target="t").problem == "exists"
    assert replica.ask("delete", "s") == "s"
    assert disk.pinned >= set(tip.names) and disk.items.keys() >= set(tip.names)
    assert replica.claim("t", [*CONVERSATION, 1]) is not None
    replica.turn("t", [*CONVERSATION, 1, 2])
    assert not disk.items.keys() & set(tip.names[-2:])  # nobody goes on from there any more
    replica.ask("delete", "t")
    assert not any(name.kind is not Kind.SESSION for name in disk.pinned)


def test_a_new_turn_replaces_the_old_snapshot(disk: FakeDisk) -> None:
    replica = Replica(disk)
    old = replica.turn("s")
    new = replica.turn("s", [*CONVERSATION, 8, 8])
    assert replica.store.where(old.names[-1]) is None
    assert all(replica.store.where(name) is not None for name in new.names)
    assert disk.pinned == set(new.names)


def test_deleted_means_deleted_everywhere(disk: FakeDisk) -> None:
    one, two = Replica(disk), Replica(disk)
    one.turn("s")
    one.ask("suspend", "s")
    assert [view.session_id for view in two.ask("list")] == ["s"]
    assert one.ask("delete", "s") == "s"
    for replica in (one, two, Replica(disk)):
        assert replica.ask("list") == []
        assert replica.ask("show", "s").problem == "unknown"
        assert replica.claim("s", [*CONVERSATION, 1]) is None
    two.turn("s", [5] * 70)  # the name is free again
    assert one.ask("show", "s").tokens == 70


def test_the_newest_version_counts_whoever_wrote_it(disk: FakeDisk) -> None:
    one, two = Replica(disk), Replica(disk)
    one.turn("s")
    disk.sync()
    assert two.claim("s", [*CONVERSATION, 1]).position == 149
    longer = [*CONVERSATION, *range(20)]
    two.turn("s", longer)
    disk.sync()
    assert one.claim("s", [*longer, 1]).position == len(longer) - 1
    (view,) = one.ask("list")
    assert view.tokens == len(longer)


def test_a_clock_that_is_set_back_makes_nothing_older(
    disk: FakeDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change is newer than what it replaces, whoever has written that."""
    ticks = iter(range(2_000_000_000, 0, -100_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: next(ticks))
    one, two, versions = Replica(disk), Replica(disk), [0]
    longer = [*CONVERSATION, *range(20)]

    def changed(replica: Replica, tokens: int) -> None:
        replica.now -= 100.0
        disk.sync()
        view = Replica(disk).ask("show", "s")
        assert view.tokens == tokens and view.version > versions[-1]
        versions.append(view.version)

    one.turn("s")
    changed(one, 150)
    two.claim("s", [*CONVERSATION, 1])
    two.turn("s", longer)
    changed(two, 170)
    one.ask("suspend", "s")
    changed(one, 170)
    two.ask("resume", "s")
    changed(two, 170)
    one.ask("delete", "s")
    disk.sync()
    assert Replica(disk).ask("show", "s").problem == "unknown"
    one.turn("s", [5] * 70)
    changed(one, 70)


def test_sessions_of_nobody_expire(disk: FakeDisk) -> None:
    replica = Replica(disk, session_ttl_s=100.0)
    replica.turn("old")
    replica.now += 60
    replica.turn("new", [3] * 80)
    disk.sync()
    replica.now += 60
    assert [view.session_id for view in replica.ask("list")] == ["new"]
    assert replica.ask("show", "old").problem == "unknown"
    replica.sessions.sweep()
    assert replica.sessions.name("a/", "old") not in disk.items
    assert len(replica.sessions) == 1
    replica.ask("resume", "new")  # to be used is to live on
    replica.now += 99
    assert replica.ask("show", "new").expires == replica.now + 1
    assert [view.session_id for view in Replica(disk, session_ttl_s=100.0).ask("list")] == ["new"]


def test_a_tenant_has_so_many_and_no_more() -> None:
    replica = Replica(None, sessions_per_tenant=2)
    replica.turn("s")
    replica.turn("t")
    assert replica.sessions.full("a/", "u") and not replica.sessions.full("a/", "t")
    assert replica.sessions.full("a/another salt", "t")  # or whoever makes up salts has no quota
    assert not replica.sessions.full("b/", "u")
    answer = replica.ask("fork", "s", target="u")
    assert answer.problem == "quota" and "2 sessions" in answer.message
    tip = Tip.of(root_key(FINGERPRINT, "a/"), CONVERSATION, 149, [])
    assert not replica.sessions.save("a/", "u", "exact", CONVERSATION, None, tip, [])
    replica.ask("delete", "s")
    assert not replica.sessions.full("a/", "u")


@pytest.mark.parametrize("full", [False, True], ids=["disk", "host"])
def test_what_the_disk_does_not_take_stays_in_memory_if_that_does(
    disk: FakeDisk, full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica(disk)
    replica.turn("s")
    disk.room, replica.store.full = 0, full
    tokens = [*CONVERSATION, 1, 1]
    tip = Tip.of(root_key(FINGERPRINT, "a/"), tokens, 151, [50])
    items = [item(name, 151, ()) for name in tip.names]
    assert replica.sessions.save("a/", "s", "exact", tokens, None, tip, items) is not full
    assert replica.claim("s", [*tokens, 1]).position == (149 if full else 151)
    told = "not saved: host memory has no room" if full else "is in memory only: there is no room"
    assert told in caplog.text


def test_verbs_wait_for_the_store_without_waiting(disk: FakeDisk) -> None:
    Replica(disk).turn("s")
    disk.sync()
    replica = Replica(disk)
    replica.store.slow = True
    answers: list[SessionAnswer] = []
    replica.verbs.call(SessionCall(verb="resume", tenant="a/", session="s"), answers.append)
    for _ in range(2):  # the manifest, then the state
        assert not answers and not replica.errands.ready
        replica.errands.poll()
        replica.store.finish()
        assert replica.errands.ready
        replica.errands.poll()
    assert answers[0].resumed is not None


def test_verbs_under_way_end_when_the_engine_does(disk: FakeDisk) -> None:
    Replica(disk).turn("s")
    disk.sync()
    replica = Replica(disk)
    replica.store.slow = True
    answers: list[SessionAnswer] = []
    replica.verbs.call(SessionCall(verb="show", tenant="a/", session="s"), answers.append)
    replica.errands.close(RuntimeError("the engine was stopped"))
    (answer,) = answers
    assert answer.problem == "failed" and "was stopped" in answer.message
    assert all(fetch.cancelled for fetch in replica.store.held)


@pytest.mark.parametrize("change", [b"", b"x", b"flip", b"other"])
def test_a_manifest_is_believed_only_if_it_says_so_itself(change: bytes) -> None:
    replica = Replica(None)
    replica.turn("s")
    (manifest,) = replica.sessions.living("a/")
    name = session_name(FINGERPRINT, "a/", "s")
    data = to_item(manifest, FINGERPRINT, b"layout").parts[0].numpy().tobytes()
    assert from_bytes(data, name, FINGERPRINT) == manifest
    if change == b"flip":  # a token of the conversation
        at = data.index(manifest.tokens) + 40
        data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    elif change == b"other":
        name = session_name(FINGERPRINT, "b/", "s")
    else:
        data = change
    assert from_bytes(data, name, FINGERPRINT) is None
