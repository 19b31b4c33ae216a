"""Sessions through the engine: what they leave behind and how exactly requests go on from it.

The reference is the model alone, token by token over state of its own: a session that was never
saved, moved or interrupted.
"""

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from expertmesh.actors.attention import session_desk
from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import (
    EngineFailed,
    GenerateRequest,
    QuotaExceeded,
    RequestRefused,
    SamplingParams,
    TokenOutput,
)
from expertmesh.actors.state import keys, tip
from expertmesh.actors.state.item import Kind
from expertmesh.actors.state.keys import extend
from expertmesh.actors.state.session_messages import SessionAnswer, SessionCall
from expertmesh.actors.state.sessions import HELD_S
from tests.support.session_store import FakeDisk, FakeStore
from tests.support.state_model import cached, small_model
from tests.support.state_oracle import Oracle, Piece, Row, Tap, tap

RUNNER = small_model()
ORACLE = Oracle(RUNNER)
FIRST = [(5 * i + 3) % 64 for i in range(100)]
SECOND = [(7 * i + 1) % 64 for i in range(90)]
THIRD = [9, 8, 7]


class Server:
    """An engine with sessions. Another one over the same disk is a restart, or another replica."""

    def __init__(self, disk: FakeDisk | None = None, **settings: Any) -> None:
        self.store = FakeStore(disk)
        self.engine: Engine = cached(RUNNER, 40, 4, self.store, **settings)
        self.tap: Tap = tap(self.engine)

    def submit(self, name: str, prompt: list[int], count: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0)
        fields = {"session": "s", "tenant": "t/"} | fields
        self.engine.submit(GenerateRequest(name, prompt, params, **fields))

    def run(self, steps: int = 1000) -> dict[str, TokenOutput]:
        ends: dict[str, TokenOutput] = {}
        for _ in range(steps):
            if not self.engine.has_work:
                break
            for output in self.engine.step():
                if output.finish_reason is not None:
                    ends[output.request_id] = output
        return ends

    def turn(
        self, name: str, prompt: list[int], count: int, **fields: Any
    ) -> tuple[list[int], int]:
        """The answer's tokens, and how many of the prompt's were not computed."""
        self.submit(name, prompt, count, **fields)
        ids: list[int] = []
        cached_tokens = 0
        while self.engine.has_work:
            for output in self.engine.step():
                assert output.error is None, output.error
                ids += output.token_ids
                cached_tokens = max(cached_tokens, output.cached_tokens)
        assert len(ids) == count
        return ids, cached_tokens

    def rows(self, name: str) -> list[Row]:
        """Logits of each token drawn, in order."""
        return [row for _, row in sorted(self.tap.seen[name].items())]

    def ask(self, verb: Any, session: str = "s", target: str = "", tenant: str = "t/") -> Any:
        call = SessionCall(verb=verb, tenant=tenant, session=session, target=target)
        future = self.engine.session(call)
        self.run()
        answer: SessionAnswer = future.result(timeout=0)
        assert answer.problem is None, answer.message
        return answer


@cache
def long_answer() -> list[int]:
    """To FIRST; shorter ones are its beginning."""
    server = Server()
    ids, _ = server.turn("1", FIRST, 100)
    assert server.rows("1") == ORACLE.expect((Piece("prompt", tuple(FIRST)),), ids)
    return ids


def conversation(first: int = 20) -> tuple[list[int], list[int]]:
    """The first answer, and the prompt of the second turn."""
    answer = long_answer()[:first]
    return answer, [*FIRST, *answer, *SECOND]


def pieces(answer: list[int]) -> tuple[Piece, ...]:
    """The second turn's prompt as it must have been computed: the last token of the first answer
    was drawn and never computed before."""
    return (
        Piece("prompt", tuple(FIRST)), Piece("answer", tuple(answer[:-1])),
        Piece("prompt", (answer[-1], *SECOND)),
    )  # fmt: skip


@pytest.mark.parametrize("first", [2, 20, 29, 93])
@pytest.mark.parametrize("step_tokens", [64, 512])
def test_a_session_goes_on_as_if_it_had_never_stopped(first: int, step_tokens: int) -> None:
    """The state is left at 101, 119, 128 and 192 tokens, off the grid and on it."""
    answer, prompt = conversation(first)
    server = Server(step_tokens=step_tokens)
    assert server.turn("1", FIRST, first)[0] == answer
    ids, cached_tokens = server.turn("2", prompt, 30)
    assert cached_tokens == 100 + first - 1
    assert server.rows("2") == ORACLE.expect(pieces(answer), ids)
    assert server.engine.stats().cache.sessions == 1


def test_a_turn_hashes_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once when it is checked that it goes on from the session, or when it is computed; besides,
    at either end, the page that has begun."""
    _, prompt = conversation()
    server, ends = Server(), list[int]()
    server.turn("1", FIRST, 20)

    def counted(parent: bytes, tokens: list[int], end: int, switches: tuple[int, ...]) -> bytes:
        ends.append(end)
        return extend(parent, tokens, end, switches)

    monkeypatch.setattr(keys, "extend", counted)
    monkeypatch.setattr(tip, "extend", counted)
    server.turn("2", prompt, 30)
    assert server.engine.stats().cache.sessions == 1
    assert ends == [64, 119, 128, 192, 239]


@pytest.mark.parametrize("way", ["restart", "kill", "replica", "resume", "same"])
def test_it_goes_on_elsewhere_with_the_same_bits(way: str) -> None:
    disk = FakeDisk()
    server = Server(disk)
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    if way == "kill":
        disk.sync()
    else:
        assert server.ask("suspend").suspended.tokens == 120
    if way != "same":
        server = Server(disk)
    if way == "resume":
        report = server.ask("resume").resumed
        assert (report.restored_tokens, report.recomputed_tokens) == (119, 0)
        assert report.tier == "disk"
    ids, cached_tokens = server.turn("2", prompt, 64)
    assert cached_tokens == 119 and server.engine.stats().recomputed_tokens == 0
    assert server.rows("2") == ORACLE.expect(pieces(answer), ids)
    third = [*prompt, *ids, *THIRD]
    ids3, cached_tokens = server.turn("3", third, 20)
    assert cached_tokens == len(third) - len(THIRD) - 1
    before = (*pieces(answer), Piece("answer", tuple(ids[:-1])), Piece("prompt", (ids[-1], *THIRD)))
    assert server.rows("3") == ORACLE.expect(before, ids3)


def test_a_fork_and_its_origin_go_their_own_ways() -> None:
    server = Server()
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    assert server.ask("fork", target="f").view.session_id == "f"
    other = [*FIRST, *answer, *THIRD]
    ids_s, _ = server.turn("2", prompt, 40)
    ids_f, cached_tokens = server.turn("3", other, 40, session="f")
    assert cached_tokens == 119
    assert server.rows("2") == ORACLE.expect(pieces(answer), ids_s)
    before = (*pieces(answer)[:2], Piece("prompt", (answer[-1], *THIRD)))
    assert server.rows("3") == ORACLE.expect(before, ids_f)


def test_two_requests_of_one_session_at_once() -> None:
    server = Server()
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    server.submit("a", prompt, 10)
    server.submit("b", [*FIRST, *answer, *THIRD], 10)
    ends = server.run()
    assert {end.cached_tokens for end in ends.values()} == {119}
    assert server.engine.stats().cache.sessions == 1
    assert server.ask("show").view.tokens in (len(prompt) + 10, 120 + len(THIRD) + 10)


def test_another_text_is_an_ordinary_prompt_and_replaces_the_session() -> None:
    server = Server()
    server.turn("1", FIRST, 20)
    other = [*FIRST[:90], 1, 2, 3, *SECOND]
    ids, cached_tokens = server.turn("2", other, 20)
    assert cached_tokens == 64  # what any prompt would have known
    assert server.rows("2") == ORACLE.expect((Piece("prompt", tuple(other)),), ids)
    assert server.ask("show").view.tokens == len(other) + 20
    shorter, _ = server.turn("3", FIRST[:70], 5)
    assert server.rows("3") == ORACLE.expect((Piece("prompt", tuple(FIRST[:70])),), shorter)


def test_other_tenants_start_from_nothing() -> None:
    server = Server()
    _, prompt = conversation()
    server.turn("1", FIRST, 20)
    ids, cached_tokens = server.turn("2", prompt, 10, tenant="u/")
    assert cached_tokens == 0
    assert server.rows("2") == ORACLE.expect((Piece("prompt", tuple(prompt)),), ids)


@pytest.mark.parametrize("what", ["snapshot", "page", "page begun", "everything"])
def test_what_is_lost_is_computed_again_and_named_after_that(what: str) -> None:
    server = Server()
    _, prompt = conversation()
    server.turn("1", FIRST, 20)
    (manifest,) = server.engine.sessions.sessions.living("t/")  # type: ignore[union-attr]
    tip = manifest.point()
    lost = {"snapshot": tip.end[1:], "page": tip.pages[:1], "page begun": tip.end[:1]}
    server.engine.cache.evict()
    server.store.drop(lost.get(what, tip.names))
    ids, cached_tokens = server.turn("2", prompt, 30)
    assert cached_tokens <= 64
    plain = ORACLE.expect((Piece("prompt", tuple(prompt)),), ids)
    assert server.rows("2") == plain
    # Whoever comes without a session finds nothing that was made in another way.
    server.turn("3", [*prompt, 5], 10, session="")
    assert server.rows("3")[0] == ORACLE.expect((Piece("prompt", (*prompt, 5)),), [0])[0]


def test_a_state_that_is_lost_while_it_loads() -> None:
    server = Server()
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    server.engine.cache.evict()
    server.store.slow = True
    server.submit("2", prompt, 5)
    for _ in range(3):
        assert not server.engine.step()
    assert not server.engine.has_work  # it waits for the load, and for nothing else
    server.store.lost = {name for _, names in server.store.waiting for name in names}
    server.store.slow = False
    server.store.finish()
    server.store.lost = set()
    ends = server.run()
    assert ends["2"].finish_reason == "length"
    answer = [one.best for one in server.rows("2")]
    assert server.rows("2") == ORACLE.expect((Piece("prompt", tuple(prompt)),), answer)


def test_a_preempted_request_goes_on_from_its_session_again() -> None:
    server = Server(priority_preemption=True)
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    server.submit("2", prompt, 40, priority=5)
    for _ in range(12):
        server.engine.step()
    for name in "wxyz":  # all four slots
        server.submit(name, [3] * 70, 4, session="", priority=-5)
    server.run()
    assert server.engine.stats().preemptions > 0
    ids = [row.best for row in server.rows("2")]
    assert server.rows("2") == ORACLE.expect(pieces(answer), ids)


def test_a_failover_goes_on_from_the_session_and_what_was_handed_out() -> None:
    disk = FakeDisk()
    server = Server(disk)
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    disk.sync()
    other = Server(FakeDisk(dict(disk.items)))  # as if the first one's second turn never ended
    ids, _ = server.turn("2", prompt, 30)
    other.submit("2", prompt, 30, resume_ids=ids[:12])
    other.run()
    assert other.rows("2") == ORACLE.expect(pieces(answer), ids)[12:]
    assert other.engine.stats().recomputed_tokens <= len(SECOND) + 1 + 12


def test_an_aborted_or_failed_request_leaves_the_session_as_it_was() -> None:
    server = Server()
    answer, prompt = conversation()
    server.turn("1", FIRST, 20)
    server.submit("2", prompt, 40)
    for _ in range(8):
        server.engine.step()
    server.engine.abort("2")
    assert server.run()["2"].finish_reason == "abort"
    assert server.ask("show").view.tokens == 120
    ids, cached_tokens = server.turn("3", prompt, 10)
    assert cached_tokens >= 119  # what the aborted one had computed is there as well
    assert server.rows("3") == ORACLE.expect(pieces(answer), ids)


def test_a_request_can_be_aborted_while_its_session_is_looked_for() -> None:
    disk = FakeDisk()
    Server(disk).turn("1", FIRST, 20)
    disk.sync()
    server = Server(disk)
    server.store.slow = True
    server.submit("2", [*FIRST, 1, 2], 5)
    server.engine.step()
    server.engine.abort("2")
    ends = server.run()
    assert ends["2"].finish_reason == "abort"
    server.store.slow = False
    server.store.finish()
    assert server.run() == {} and server.engine.stats().waiting == 0
    assert server.ask("show").view.tokens == 120


@pytest.mark.parametrize("disk", [None, FakeDisk()])
def test_a_turn_under_way_does_not_bring_a_deleted_session_back(disk: FakeDisk | None) -> None:
    server = Server(disk)
    _, _ = server.turn("1", FIRST, 5)
    server.submit("2", [*FIRST, 1], 20)
    for _ in range(5):
        server.engine.step()
    server.submit("ahead", [*FIRST, 1], 20, arrived=time.time() + 60)  # another door's clock
    server.engine.step()
    assert server.ask("delete").deleted == "s"  # at once; the turn goes on
    assert len(server.tap.seen["2"]) == 20 and server.ask("list").views == []
    server.submit("heir", [*FIRST, 1], 20, arrived=time.time() - 60)  # it was with another engine
    server.run()
    assert server.ask("list").views == []
    server.turn("3", FIRST, 2)  # begun after it
    assert [view.session_id for view in server.ask("list").views] == ["s"]


def test_an_engine_that_fails_ends_calls_about_sessions() -> None:
    disk = FakeDisk()
    Server(disk).turn("1", FIRST, 20)
    disk.sync()
    server = Server(disk)
    server.store.slow = True
    waiting = server.engine.session(SessionCall(verb="show", tenant="t/", session="s"))
    server.engine.step()
    behind = server.engine.session(SessionCall(verb="list", tenant="t/"))
    server.submit("2", [*FIRST, 1, 2], 5)
    (output,) = server.engine.fail("the end")
    assert output.lost and output.error == "the end"
    assert waiting.result(timeout=0).problem == "failed"
    assert isinstance(behind.exception(timeout=0), EngineFailed)
    with pytest.raises(EngineFailed, match="the end"):
        server.engine.session(SessionCall(verb="list", tenant="t/"))


@pytest.mark.parametrize("disk", [None, FakeDisk()])
def test_an_idle_engine_lets_go_of_what_time_has_ended(
    disk: FakeDisk | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that `resume` holds, then the session itself; nobody asks for anything meanwhile."""
    server = Server(disk)
    engine, store = server.engine, server.store
    server.turn("1", FIRST, 20)
    engine.cache.evict()
    server.ask("resume")
    held, steps = store.held[-1], engine.stats().steps
    assert held.items and not held.cancelled
    monkeypatch.setattr(session_desk, "SWEEP_S", 0.01)
    loop = EngineLoop(engine, lambda outputs: None)
    loop.start()
    try:
        pass_time(engine, HELD_S, lambda: held.cancelled)
        assert engine.stats().cache.sessions == 1
        pass_time(engine, 86_400, lambda: engine.stats().cache.sessions == 0)
    finally:
        loop.stop()
    assert engine.stats().steps == steps and not store.disk.pinned


def pass_time(engine: Engine, seconds: float, until: Callable[[], bool]) -> None:
    """For the engine's sessions, so many seconds; for the test, until that is so."""
    sessions = engine.sessions.sessions  # type: ignore[union-attr]
    before, end = sessions._clock, time.monotonic() + 20
    sessions._clock = lambda: before() + seconds
    while not until():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.002)


def test_an_engine_wakes_by_itself_only_for_sessions() -> None:
    assert cached(RUNNER, 40, 4).patience is None
    server = Server()
    assert server.engine.patience is None and not server.engine.has_work
    server.turn("1", FIRST, 1)
    assert server.engine.patience == session_desk.SWEEP_S
    disk = FakeDisk()
    Server(disk).turn("1", FIRST, 1)
    disk.sync()
    restarted = Server(disk)  # it has read nothing yet
    assert restarted.engine.patience == session_desk.SWEEP_S
    restarted.run()
    assert restarted.engine.stats().cache.sessions == 1
    restarted.engine.fail("the end")
    assert restarted.engine.patience is None and not restarted.engine.has_work


def test_a_prompt_that_is_only_scored_leaves_a_session_too() -> None:
    server = Server()
    server.submit("1", FIRST, 0)
    server.run()
    assert server.ask("show").view.position == 100
    assert server.turn("2", [*FIRST, *THIRD], 10)[1] == 100


def test_what_restarts_off_the_grid_in_a_prompt_has_names_of_its_own() -> None:
    """Two ways to 200 tokens: a prompt that stopped at 100 and went on, and one that decoded from
    there. Same tokens, other bits: neither may be taken for the other, nor for a plain prompt."""
    server = Server()
    answer = long_answer()
    whole = [*FIRST, *answer]
    server.submit("1", FIRST, 1, session="stopped")
    server.run()
    server.turn("2", [*whole, 7], 5, session="stopped")
    server.turn("3", FIRST, 100, session="decoded")
    server.turn("4", [*whole, 7], 5, session="decoded")
    before = (
        Piece("prompt", tuple(FIRST)), Piece("answer", tuple(answer[:-1])),
        Piece("prompt", (answer[-1], 7)),
    )  # fmt: skip
    ids = [row.best for row in server.rows("4")]
    assert server.rows("4") == ORACLE.expect(before, ids)
    server.turn("5", [*whole, 7], 5, session="")
    ids = [row.best for row in server.rows("5")]
    assert server.rows("5") == ORACLE.expect((Piece("prompt", (*whole, 7)),), ids)


@pytest.mark.parametrize(
    ("fields", "said", "kind"),
    [
        ({"kv_mode": "select"}, "kv_mode exact", RequestRefused),
        ({"session": "third"}, "2 sessions", QuotaExceeded),
    ],
)
def test_what_can_never_be_is_refused(
    fields: dict[str, Any], said: str, kind: type[RequestRefused]
) -> None:
    server = Server(state={"sessions_per_tenant": 2})
    for name in ("first", "second"):
        server.turn(name, FIRST[:70], 1, session=name)
    with pytest.raises(RequestRefused, match=said) as refused:
        server.submit("1", FIRST, 5, **fields)
    assert refused.value.field == "session_id" and type(refused.value) is kind
    server.turn("first again", FIRST, 1, session="first")
    server.turn("another tenant", FIRST, 1, session="third", tenant="u/")


def test_without_tiers_there_are_no_sessions_and_requests_are_served_all_the_same() -> None:
    engine = cached(RUNNER, 40, 4)
    params = SamplingParams(max_tokens=5, temperature=0.0)
    engine.submit(GenerateRequest("1", FIRST, params, session="s"))
    ids: list[int] = []
    while engine.has_work:
        ids += [token for output in engine.step() for token in output.token_ids]
    assert ids == long_answer()[:5]
    call = SessionCall(verb="list", tenant="t/")
    assert engine.session(call).result(timeout=0).views == []
    call = SessionCall(verb="resume", tenant="t/", session="s")
    assert engine.session(call).result(timeout=0).problem == "unknown"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(60, 10), (30, 5)],
    ids=["opened by the answer", "had from the start"],
)
def test_a_page_that_was_not_filled_is_saved_with_nothing_of_its_former_owner(
    prompt: int, count: int
) -> None:
    server = Server()
    server.engine.state.latents.fill_(777.0)  # every page has had another owner
    server.turn("1", FIRST[:prompt], count)
    end = prompt + count - 1  # the last token was only drawn
    (begun,) = (
        item
        for name, item in server.store.host.items()
        if name.kind is Kind.PAGE and item.header.position == end
    )
    rows = begun.parts[0]
    assert (rows[:, : end % 64] != 0).any() and not (rows[:, end % 64 :] != 0).any()
