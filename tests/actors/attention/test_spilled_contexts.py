"""Requests whose oldest pages are on disk, through the engine: room, bits, and what fails."""

import errno
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import RequestRefused
from expertmesh.actors.state.offload.context import OffloadedContext
from expertmesh.actors.state.offload.spill import REASONS, Shape, Spill, piece_bytes
from tests.actors.attention.test_contexts import (
    ANSWER,
    PROMPT,
    ROOM,
    ask,
    bytes_off,
    engine_with,
    prompt,
    run,
    same,
)
from tests.support.engines import Answer, check_books, check_idle, collect, request, spill_of
from tests.support.faulty_files import FaultyFiles
from tests.support.state_model import small_model

PAGE = small_model().state.page_bytes
# Nine pages of each request leave the device; three and more stay in host memory.
PIECE_PAGES = 2
LEAST = bytes_off() - 3 * PIECE_PAGES * PAGE


def piece() -> int:
    layout = small_model().state.layout
    layers, tokens, width = layout.page
    return piece_bytes(Shape(layers, tokens, width, layout.dtype), PIECE_PAGES)


def spilling(
    folder: Path, host: int, pieces: int, pages: int = 30, store: bool = False, **state: Any
) -> Engine:
    """host: bytes for old pages there. pieces: that the disk has room for."""
    engine = engine_with(
        pages,
        store,
        offload_bytes=host,
        offload_disk_bytes=pieces * piece(),
        offload_disk_tokens=64 * PIECE_PAGES,
        disk=folder,
        disk_bytes=64 << 20,
        **state,
    )
    of(engine).files = FaultyFiles()
    return engine


def of(engine: Engine) -> Spill:
    spill = spill_of(engine)
    assert spill is not None
    return spill


def faults(engine: Engine) -> FaultyFiles:
    files = of(engine).files
    assert isinstance(files, FaultyFiles)
    return files


def started(engine: Engine, name: str = "a", mode: str = "offload", **params: Any) -> None:
    """The request is past its prompt, with pages on disk."""
    engine.submit(ask(name, mode, **params))
    while not any(seq.id == name and seq.generated for seq in engine.scheduler.running):
        engine.step()
        check_books(engine)
    assert engine.stats().cache.spilled_bytes > 0


def rest(engine: Engine, answers: dict[str, Answer]) -> Answer:
    for _ in range(20_000):
        if not engine.has_work:
            break
        collect(engine.step(), answers)
        check_books(engine)
    check_idle(engine)
    return answers["a"]


@pytest.fixture(scope="module")
def exact() -> Answer:
    return run(engine_with(24), ask("a", "exact"))["a"]


@pytest.mark.parametrize("store", [False, True])
def test_disk_serves_what_host_memory_cannot(tmp_path: Path, exact: Answer, store: bool) -> None:
    engine = spilling(tmp_path, LEAST, 3, ROOM, store)
    assert same(run(engine, ask("a", "offload"))["a"], exact)
    stats = engine.stats().cache
    assert stats.spilled_bytes == stats.offloaded_bytes == 0 and engine.pages.free == ROOM
    assert stats.spill_capacity_bytes == 3 * piece()
    assert stats.spill_written_bytes == 3 * PIECE_PAGES * PAGE < stats.spill_read_bytes
    assert not any(stats.spill_failures.values()) and set(stats.spill_failures) == set(REASONS)
    with pytest.raises(RequestRefused, match=f"{LEAST} for that, and {3 * piece()} on disk"):
        engine.submit(ask("b", "offload", prompt(PROMPT + 128)))


def test_several_share_host_memory_and_disk(tmp_path: Path, exact: Answer) -> None:
    """Three run at once where host memory alone has room for one and a bit."""
    engine = spilling(tmp_path, 3 * LEAST + 2 * PAGE, 9)
    for name in "abc":
        engine.submit(ask(name, "offload"))
    answers: dict[str, Answer] = {}
    most = 0
    while engine.has_work:
        collect(engine.step(), answers)
        check_books(engine)
        most = max(most, len(engine.scheduler.running))
        cache = engine.stats().cache
        assert cache.offloaded_bytes <= 3 * LEAST + 2 * PAGE
        assert cache.spilled_bytes <= cache.spill_capacity_bytes
    assert most == 3 and engine.stats().preemptions == 0
    assert all(same(answers[name], exact) for name in "abc")


def test_a_newcomer_pushes_what_is_there_to_disk(tmp_path: Path, exact: Answer) -> None:
    engine = spilling(tmp_path, bytes_off() + LEAST, 9)
    answers: dict[str, Answer] = {}
    engine.submit(ask("a", "offload"))
    while not answers:
        collect(engine.step(), answers)
    assert engine.stats().cache.spilled_bytes == 0
    engine.submit(ask("b", "offload"))
    assert same(rest(engine, answers), exact) and same(answers["b"], exact)
    assert engine.stats().cache.spill_written_bytes >= 3 * PIECE_PAGES * PAGE
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("mode", ["offload", "select"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [("read_errno", "io"), ("flip", "corrupt"), ("write_errno", "full"), ("short", "corrupt")],
)
def test_what_the_disk_loses_is_computed_again(
    tmp_path: Path, exact: Answer, mode: str, fault: str, reason: str
) -> None:
    """Alone in host memory, which has just enough room for it."""
    engine = spilling(tmp_path, 2 * bytes_off() - PAGE, 9, select_mass=1.0, select_pages=1)
    engine._contexts._offload.fit_pages = 4  # type: ignore[union-attr]
    wanted = run(engine, ask("a", mode))["a"]
    assert mode == "select" or same(wanted, exact)
    answers: dict[str, Answer] = {}
    for name in "ab":
        engine.submit(ask(name, mode))
    while engine.stats().cache.spilled_bytes == 0 or len(answers) < 2:
        collect(engine.step(), answers)
    setattr(faults(engine), fault, errno.ENOSPC if fault == "write_errno" else errno.EIO)
    if fault == "write_errno":  # until something is written again
        engine.submit(ask("c", mode))
    found = rest(engine, answers)
    assert same(found, wanted) and all(same(answers[name], wanted) for name in answers)
    stats = engine.stats()
    assert stats.preemptions >= 1 and stats.cache.spill_failures[reason] >= 1
    assert stats.recomputed_tokens > 0 and stats.finished_error == 0


def test_what_is_lost_and_has_no_other_room_ends_for_another_engine(
    tmp_path: Path, exact: Answer
) -> None:
    """With what it said until then, which is right; those beside it go on."""
    engine = spilling(tmp_path, LEAST, 3)
    started(engine)
    answers: dict[str, Answer] = {}
    engine.submit(request("short", prompt(100), 30))
    alone = run(engine_with(24), request("short", prompt(100), 30))["short"]
    for _ in range(5):
        collect(engine.step(), answers)
    faults(engine).read_errno = errno.EIO
    found = rest(engine, answers)
    # The front door resumes what an engine aborts; one that says `lost` it would not ask again.
    assert found.finish_reason == "abort" and not found.lost and found.finishes == 1
    assert found.error is not None and "old pages on disk are lost (io)" in found.error
    assert str(LEAST) in found.error
    assert exact.token_ids[1 : 1 + len(found.token_ids)] == found.token_ids
    assert same(answers["short"], alone)


@pytest.mark.parametrize("computed", [384, 512, 640])
def test_what_is_lost_leaves_no_state_behind(tmp_path: Path, exact: Answer, computed: int) -> None:
    """Pages and snapshots of a step that has read nothing are nobody's."""
    engine = spilling(tmp_path, LEAST, 3, 40, True, ladder_tokens=64)
    engine.submit(ask("a", "offload"))
    answers: dict[str, Answer] = {}
    while not any(seq.computed >= computed for seq in engine.scheduler.running):
        collect(engine.step(), answers)
    faults(engine).flip = True
    assert rest(engine, answers).finish_reason == "abort"
    faults(engine).flip = False
    assert same(run(engine, ask("b", "exact"))["b"], exact)
    for length in range(129, PROMPT, 64):  # whatever snapshot there is
        engine.cache.observe(1, 1e3)
        found = run(engine, ask("c", "exact", prompt()[:length]))["c"]
        assert same(found, run(engine_with(24), ask("c", "exact", prompt()[:length]))["c"])
    assert engine.stats().cache.hits > 3 * PROMPT


def test_a_disk_that_hangs_holds_nobody_up_for_long(tmp_path: Path, exact: Answer) -> None:
    engine = spilling(tmp_path, 2 * bytes_off() - PAGE, 9, read_timeout_s=0.3)
    answers: dict[str, Answer] = {}
    for name in "ab":
        engine.submit(ask(name, "offload"))
    while engine.stats().cache.spilled_bytes == 0 or len(answers) < 2:
        collect(engine.step(), answers)
    faults(engine).hang.clear()
    timer = threading.Timer(20, faults(engine).hang.set)
    timer.start()
    found = rest(engine, answers)
    assert not faults(engine).hang.is_set()  # done without it
    faults(engine).hang.set()
    timer.cancel()
    assert same(found, exact) and same(answers["b"], exact)
    assert engine.stats().cache.spill_failures["timeout"] >= 1


@pytest.mark.parametrize("answer", [ANSWER, 0])
def test_log_probabilities_and_routing_are_told_once(tmp_path: Path, answer: int) -> None:
    """Of what was computed in vain, nothing is told."""

    def asked(name: str) -> Any:
        made = request(name, prompt(), answer, logprobs=0, **params)
        return msgspec.structs.replace(made, kv_mode="offload")

    params: dict[str, Any] = {"prompt_logprobs": 0, "want_routed_experts": True}
    runner = small_model(experts=True)
    wanted = run(engine_with(24, runner=runner), asked("a"))["a"]
    tokens = PROMPT + max(answer, 1) - 1
    assert len(wanted.routed) == tokens * runner.config.experts_per_token * 3 * 2
    assert wanted.prompt_logprobs is not None and len(wanted.prompt_logprobs) == PROMPT
    for steps in (6, 9, 10, 11, 12, 20, 40):
        if steps > PROMPT // 64 and not answer:
            break
        engine = spilling(tmp_path, bytes_off(), 9, runner=runner)
        answers: dict[str, Answer] = {}
        engine.submit(asked("a"))
        for _ in range(steps):
            collect(engine.step(), answers)
        for seq in engine.scheduler.running:  # as if others needed the room
            assert seq.context is not None
            seq.context.settle(3)
        faults(engine).flip = True
        assert rest(engine, answers) == wanted
        assert engine.stats().preemptions == 1


def test_aborts_and_ends_leave_no_file_open(tmp_path: Path) -> None:
    engine = spilling(tmp_path, LEAST, 3)
    for steps in (6, 12, 20):
        engine.submit(ask("a", "offload"))
        for _ in range(steps):
            engine.step()
        engine.abort("a")
        engine.step()
        check_idle(engine)
    run(engine, ask("a", "offload"))
    of(engine).threads.submit(lambda: None).result(10)
    for _ in range(1000):
        if not faults(engine).open_fds:
            break
        threading.Event().wait(0.01)
    assert not faults(engine).open_fds and engine.stats().cache.spilled_bytes == 0


def test_a_known_prompt_begins_on_disk(
    tmp_path: Path, exact: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of it from the tiers goes where it has room, as it is taken."""
    take = OffloadedContext.take

    def watched(context: OffloadedContext, rows: Tensor) -> None:
        take(context, rows)
        assert context.host_bytes <= LEAST

    monkeypatch.setattr(OffloadedContext, "take", watched)
    engine = spilling(tmp_path, LEAST, 3, ROOM + 2, store=True)
    first = run(engine, ask("a", "offload"))["a"]
    engine.cache.observe(1, 1e3)
    assert same(first, exact) and same(run(engine, ask("b", "offload"))["b"], exact)
    assert engine.stats().cache.hits == PROMPT // 64 * 64


def test_without_a_disk_nothing_is_spilled(exact: Answer) -> None:
    engine = engine_with(24, offload_bytes=bytes_off())
    assert same(run(engine, ask("a", "offload"))["a"], exact)
    stats = engine.stats().cache
    assert stats.spill_capacity_bytes == 0 and not stats.spill_failures
    assert spill_of(engine) is None


def test_answers_are_those_of_the_request(tmp_path: Path) -> None:
    """A mode of its own, on an engine whose requests are exact by default."""
    engine = spilling(tmp_path, LEAST, 3, ROOM)
    assert engine.limits.near_pages == ROOM
    with pytest.raises(RequestRefused, match="kv_mode offload or select would serve it"):
        engine.submit(msgspec.structs.replace(ask("a", "exact"), kv_mode=""))
    assert len(run(engine, ask("a", "offload"))["a"].token_ids) == ANSWER


def test_a_disk_that_has_just_failed_is_not_begun_with(tmp_path: Path, exact: Answer) -> None:
    """Where there is room without it; else it is tried again."""
    engine = spilling(tmp_path, bytes_off(), 9)
    of(engine)._breaker.trip()
    for name, length in (("a", PROMPT), ("b", PROMPT + 128)):
        engine.submit(ask(name, "offload", prompt(length)))
    engine.step()
    contexts = {seq.id: seq.context for seq in engine._sequences.values()}
    assert not contexts["a"].disk and contexts["b"].disk  # type: ignore[union-attr]
    of(engine)._breaker.succeeded()
    answers: dict[str, Answer] = {}
    assert same(rest(engine, answers), exact) and answers["b"].finish_reason == "length"


def test_who_has_no_part_in_a_step_begins_again_all_the_same(tmp_path: Path, exact: Answer) -> None:
    """A piece that was not written stays in host memory, where it has no room."""
    engine = spilling(tmp_path, 3 * bytes_off(), 9, pages=40)
    answers: dict[str, Answer] = {}
    for name in "abc":  # the budget of a step is for two of them
        engine.submit(ask(name, "offload"))
    engine.step()
    last = engine.scheduler.running[-1]
    assert last.context is not None and last.computed == 0
    last.context.lost = "full"
    collect(engine.step(), answers)
    assert last in engine.scheduler.waiting and not last.context.disk and not last.lost
    assert same(rest(engine, answers), exact) and same(answers["c"], exact)
