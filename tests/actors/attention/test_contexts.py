"""Requests whose old pages leave the device, through the engine: pages, bits, hits, refusals."""

from typing import Any

import msgspec
import pytest
import torch

from expertmesh.actors.attention.contexts import near_pages
from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, KvReport, RequestRefused
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.engines import Answer, check_books, collect, fake_engine, finish, request
from tests.support.runner import Runner
from tests.support.state_model import VOCAB, poisoned, small_model

PROMPT, ANSWER = 650, 40
NEAR = {"sink_tokens": 64, "window_tokens": 64}
# Sinks, window, a chunk and a page more.
ROOM = 1 + 1 + 2 + 1


def prompt(length: int = PROMPT, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (length,), generator=draw).tolist()


def engine_with(
    pages: int, store: bool = False, runner: Runner | None = None, **state: Any
) -> Engine:
    settings = StateSettings(**(NEAR | state))
    runner = runner or small_model()
    made = poisoned(runner.model, pages, 4, snapshots=8)
    tiers = None
    if store:
        layout = StateLayout.of(runner.config, torch.float32)
        tiers = TieredStore(layout, settings, disk=None, wake=lambda: None)
    return Engine(
        runner.model,
        made,
        runner.exchange,
        EngineSettings(pages=pages, slots=4, step_tokens=128, state=settings),
        [],
        fingerprint=b"a model" if store else None,
        store=tiers,
    )


def run(engine: Engine, *requests: GenerateRequest) -> dict[str, Answer]:
    """To the end, with the books checked after every step."""
    answers: dict[str, Answer] = {}
    for one in requests:
        engine.submit(one)
    steps = 0
    while len(answers) < len(requests) or any(a.finish_reason is None for a in answers.values()):
        outputs = engine.step()
        if not outputs and not engine.scheduler.running:
            engine.arrived.wait(0.01)
        collect(outputs, answers)
        check_books(engine)
        if isinstance(engine.cache, StateCache):
            engine.cache.device.check()
        steps += 1
        assert steps < 20_000
    return answers


def ask(name: str, mode: str, tokens: list[int] | None = None, **params: Any) -> GenerateRequest:
    made = request(name, prompt() if tokens is None else tokens, ANSWER, logprobs=0, **params)
    return msgspec.structs.replace(made, kv_mode=mode)


def same(one: Answer, other: Answer) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


@pytest.fixture(scope="module")
def exact() -> Answer:
    """With room for everything."""
    return run(engine_with(24), ask("a", "exact"))["a"]


def test_a_context_needs_no_more_pages_than_its_window(exact: Answer) -> None:
    engine = engine_with(ROOM)
    assert engine.limits.near_pages == near_pages(engine.settings) == ROOM
    assert same(run(engine, ask("a", "offload"))["a"], exact)
    assert engine.pages.free == ROOM
    with pytest.raises(RequestRefused, match="need 11 pages") as refused:
        engine.submit(ask("b", "exact"))
    assert refused.value.field == "prompt"


def test_several_at_a_time_share_a_small_pool(exact: Answer) -> None:
    """Two fit, four want to run: some are preempted and begin again."""
    engine = engine_with(2 * ROOM + 1)
    found = run(engine, *(ask(name, "offload") for name in "abcd"))
    assert all(same(answer, exact) for answer in found.values())


def bytes_off(tokens: int = PROMPT + ANSWER - 1) -> int:
    """Of pages that are off the device when so many tokens are computed."""
    return ((tokens - 64) // 64 - 1) * small_model().state.page_bytes


@pytest.mark.parametrize("store", [False, True])
def test_host_memory_for_old_pages_is_waited_for(exact: Answer, store: bool) -> None:
    """Room for one and a half: one runs at a time, and what is short passes those that wait."""
    most = bytes_off()
    engine = engine_with(30, store, offload_bytes=most * 3 // 2)
    for name in "abc":
        engine.submit(ask(name, "offload"))
    engine.submit(ask("short", "offload", prompt(100)))
    answers: dict[str, Answer] = {}
    seen: list[int] = []
    while engine.has_work:
        outputs = engine.step()
        if not outputs and not engine.scheduler.running:
            engine.arrived.wait(0.01)
        collect(outputs, answers)
        check_books(engine)
        assert sum(seq.context is not None for seq in engine.scheduler.running) <= 1
        cache = engine.stats().cache
        seen.append(cache.offloaded_bytes)
        assert cache.offload_capacity_bytes == most * 3 // 2
    assert set(list(answers)[:2]) == {"a", "short"}
    assert all(same(answers[name], exact) for name in "abc")
    assert max(seen) == most and seen[-1] == 0 and engine.stats().preemptions == 0
    assert engine.scheduler.room.free == most * 3 // 2


def test_an_answer_that_grows_takes_room_from_the_least_urgent() -> None:
    """Both prompts have room, and head room of a page; both answers have not."""
    ids = prompt(690)
    page = small_model().state.page_bytes
    assert bytes_off(len(ids) + ANSWER - 1) == bytes_off(len(ids)) + page
    engine = engine_with(2 * ROOM + 2, offload_bytes=2 * bytes_off(len(ids)) + page)
    answers = run(engine, ask("a", "offload", ids), ask("b", "offload", ids))
    expected = run(engine_with(24), ask("a", "exact", ids))["a"]
    assert same(answers["a"], expected) and same(answers["b"], expected)
    assert engine.stats().preemptions == 1


def test_what_is_urgent_takes_room_from_what_is_not(exact: Answer) -> None:
    """From who has some: a short one, later still, goes on."""
    engine = engine_with(30, offload_bytes=bytes_off())
    for name, tokens, priority in (("a", prompt(), 1), ("b", prompt(100), 2), ("c", prompt(), 0)):
        one = ask(name, "offload", tokens)
        engine.submit(msgspec.structs.replace(one, priority=priority))
        engine.step()
    assert [seq.id for seq in engine.scheduler.running] == ["c", "b"]
    answers = finish(engine)
    assert same(answers["a"], exact) and same(answers["c"], exact)
    assert engine.stats().preemptions == 1


@pytest.mark.parametrize("mode", ["offload", "select"])
def test_what_could_never_have_room_stays_on_the_device(exact: Answer, mode: str) -> None:
    """Where there are pages for it; with a base of 8 bits beside its rows, select needs more."""
    little = bytes_off() - (mode == "offload")
    engine = engine_with(24, offload_bytes=little, codec="int8")
    engine.submit(ask("a", mode))
    engine.step()
    assert engine.scheduler.running[0].context is None
    assert same(finish(engine)["a"], exact)
    with pytest.raises(RequestRefused, match=f"bytes of host memory, which has {little} for that"):
        engine_with(ROOM, offload_bytes=little, codec="int8").submit(ask("a", mode))
    with pytest.raises(RequestRefused, match=r"the whole cache has 5$"):
        engine_with(ROOM, offload_bytes=little, codec="int8").submit(ask("a", "exact"))


def test_the_default_of_the_settings(exact: Answer) -> None:
    found = run(engine_with(ROOM, kv_mode="offload"), ask("a", ""))["a"]
    assert same(found, exact)


def test_short_requests_have_no_context() -> None:
    engine = engine_with(24)
    engine.submit(ask("a", "offload", prompt(100)))
    engine.step()
    assert engine.scheduler.running[0].context is None


@pytest.mark.parametrize("pages", [30, ROOM + 2])
def test_a_prompt_that_is_known_is_not_computed_again(exact: Answer, pages: int) -> None:
    """From the device where it still is there, from the host where not; and for exact requests."""
    engine = engine_with(pages, store=True)
    first = run(engine, ask("a", "offload"))["a"]
    engine.cache.observe(1, 1e3)  # loading is worth while, however slow this machine
    again = run(engine, ask("b", "offload"))["b"]
    assert same(first, exact) and same(again, exact)
    stats = engine.stats()
    assert stats.cache.hits == PROMPT // 64 * 64
    assert stats.prompt_tokens == 2 * PROMPT and stats.pages_free == pages
    if pages == 30:
        engine.cache.observe(1, 1e3)
        assert same(run(engine, ask("c", "exact"))["c"], exact)
        assert engine.stats().cache.hits == 2 * (PROMPT // 64 * 64)


def test_select_reports_what_it_estimates(exact: Answer) -> None:
    engine = engine_with(ROOM, select_pages=2, select_mass=0.5)
    engine._contexts._offload.fit_pages = 4  # type: ignore[union-attr]
    answers: dict[str, Answer] = {}
    reports: list[KvReport] = []
    scratch: list[int] = []
    engine.submit(ask("a", "select"))
    while engine.has_work:
        outputs = engine.step()
        scratch.append(engine._contexts._offload.scratch.nbytes)  # type: ignore[union-attr]
        reports += [output.kv for output in outputs if output.kv is not None]
        collect(outputs, answers)
    assert answers["a"].finish_reason == "length"
    assert max(scratch) > 0 == scratch[-1]  # for the prompt alone
    assert len(reports) == ANSWER and reports[-1].mode == "select"
    layers = 2
    assert reports[-1].read_pages == 2 * layers * (ANSWER - 1)
    assert reports[-1].estimated_pages > reports[-1].read_pages
    assert 0 < reports[-1].bound < 1 and reports[-1].bound_kind == "estimate"
    assert 0 < reports[-1].bits < 32
    # The prompt was computed exactly, and so its first token.
    assert answers["a"].logprobs[0] == exact.logprobs[0]
    stats = engine.stats().cache
    assert stats.selected_pages == reports[-1].read_pages
    assert stats.skipped_pages == reports[-1].estimated_pages


def test_what_was_selected_never_serves_what_is_exact(exact: Answer) -> None:
    engine = engine_with(30, store=True, select_pages=1, select_mass=0.1)
    engine._contexts._offload.fit_pages = 4  # type: ignore[union-attr]
    chosen = run(engine, ask("a", "select"))["a"]
    assert same(run(engine, ask("b", "exact"))["b"], exact)
    assert engine.stats().cache.hits == 0
    engine.cache.observe(1, 1e3)
    assert same(run(engine, ask("c", "select"))["c"], chosen)
    assert engine.stats().cache.hits == PROMPT // 64 * 64


def test_a_preempted_selection_goes_on_as_it_was() -> None:
    alone = engine_with(30, select_pages=2, select_mass=0.5)
    alone._contexts._offload.fit_pages = 4  # type: ignore[union-attr]
    expected = run(alone, ask("a", "select"))["a"]
    engine = engine_with(30, select_pages=2, select_mass=0.5)
    engine._contexts._offload.fit_pages = 4  # type: ignore[union-attr]
    answers: dict[str, Answer] = {}
    engine.submit(ask("a", "select"))
    for step in range(20_000):
        if not engine.has_work:
            break
        if step in (4, 20, 21):
            engine.scheduler.preempt(engine.scheduler.running[0])
        collect(engine.step(), answers)
    assert engine.stats().preemptions == 3
    assert same(answers["a"], expected)


def test_an_abort_leaves_nothing_behind() -> None:
    engine = engine_with(ROOM + 2, store=True)
    for steps in (1, 3, 6, 9):
        engine.submit(ask("a", "offload", prompt(seed=steps)))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.step()
        check_books(engine)
        assert not engine.scheduler.running and engine.pages.free == ROOM + 2


def test_what_is_no_number_is_found_by_nobody() -> None:
    """Neither what is still on the device nor what has left it."""
    engine = engine_with(30, store=True)
    engine.submit(ask("a", "offload"))
    answers: dict[str, Answer] = {}
    while not answers:
        collect(engine.step(), answers)
    assert isinstance(engine.cache, StateCache)
    engine.cache.state.kda.fill_(torch.nan)
    while engine.has_work:
        collect(engine.step(), answers)
    assert answers["a"].finish_reason == "error"
    check_books(engine)
    engine.cache.device.check()
    engine.cache.observe(1, 1e3)
    run(engine, ask("b", "offload"))
    assert engine.stats().cache.hits == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestRefused, match="none of exact, offload, select"):
        engine_with(24).submit(ask("a", "guess"))
    with pytest.raises(RequestRefused, match="not with this model") as refused:
        fake_engine().submit(ask("a", "select", [5] * 9))
    assert refused.value.field == "kv_mode"
    with pytest.raises(ValueError, match="kv_mode select"):
        fake_engine(state=StateSettings(kv_mode="select"))
    with pytest.raises(RequestRefused, match="the whole cache has 4"):
        engine_with(4).submit(ask("a", "offload"))
