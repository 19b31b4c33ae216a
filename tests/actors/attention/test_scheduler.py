"""Order, bounds and fairness, seen through the engine's steps."""

import pytest

from expertmesh.actors.attention.engine import Engine
from tests.support.engines import (
    Answer,
    check_books,
    check_idle,
    collect,
    fake_engine,
    finish,
    request,
)
from tests.support.fake_model import FakeModel


def names(engine: Engine) -> list[str]:
    return [seq.id for seq in engine.scheduler.running]


def chunks_of(engine: Engine) -> list[tuple[int, int]]:
    """(position, length) of each prompt chunk in the last batch."""
    batch = engine.model.batches[-1]  # type: ignore[attr-defined]
    return [(span.position, span.length) for span in batch.prefill_spans]


@pytest.mark.parametrize(
    ("step_tokens", "expected"),
    [
        (64, [64, 64, 64, 8]),
        (65, [64, 64, 64, 8]),
        (130, [128, 72]),
        (4096, [200]),
        (40, [40, 24, 40, 24, 40, 32]),
    ],
)
def test_chunks_end_on_the_grid(step_tokens: int, expected: list[int]) -> None:
    engine = fake_engine(step_tokens=step_tokens)
    engine.submit(request("r", [1] * 200, 1))
    seen = []
    while engine.has_work:
        engine.step()
        seen += [length for _, length in chunks_of(engine)]
    assert seen == expected


def test_chunk_edges_do_not_depend_on_companions() -> None:
    engine = fake_engine(step_tokens=100, slots=16)
    for i in range(6):
        engine.submit(request(f"d{i}", [i], 60))
    engine.step()
    for i in range(3):
        engine.submit(request(f"p{i}", [i] * 330, 1))
    while engine.scheduler.waiting or any(s.computed < s.prompt_len
                                          for s in engine.scheduler.running):  # fmt: skip
        engine.step()
        for position, length in chunks_of(engine):
            assert position % 64 == 0
            assert (position + length) % 64 == 0 or position + length in (1, 330)


def test_prompts_move_on_beside_any_number_of_decodes() -> None:
    # 12 decode rows eat the whole budget of 8: a chunk still runs in every step.
    engine = fake_engine(step_tokens=8, slots=16)
    for i in range(12):
        engine.submit(request(f"d{i}", [i], 200))
    for _ in range(12):
        engine.step()
    engine.submit(request("p", [1] * 40, 1))
    answers: dict[str, Answer] = {}
    for _ in range(5):
        collect(engine.step(), answers)
    assert answers["p"].finish_reason == "length"


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    engine = fake_engine(step_tokens=256, pages=100)
    engine.submit(request("long", [1] * 4000, 1))
    engine.step()
    engine.submit(request("short", [2] * 60, 1))
    answers: dict[str, Answer] = {}
    collect(engine.step(), answers)
    assert answers["short"].finish_reason == "length"
    assert chunks_of(engine) == [(256, 192), (0, 60)]


def test_light_ones_pass_a_heavy_one_a_bounded_number_of_times() -> None:
    # D10: 70 % held by a long decode, one that needs 50 %, then light ones.
    engine = fake_engine(pages=100, slots=8, max_bypass=5, model=FakeModel(max_position=8192))
    engine.submit(request("holder", [1] * (69 * 64), 120, priority=-1))
    for _ in range(12):
        engine.step()
    engine.submit(request("heavy", [2] * (50 * 64), 2))
    for i in range(10):
        engine.submit(request(f"light{i}", [3 + i] * 64, 3))
    order: list[str] = []
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        order += [n for n in names(engine) if n not in order]
        check_books(engine)
    assert order[:6] == ["holder", *(f"light{i}" for i in range(5))]
    assert order[6] == "heavy"
    assert all(a.finish_reason == "length" for a in answers.values())
    assert engine.scheduler.preemptions == 0
    check_idle(engine)


def test_a_heavy_one_does_not_evict_equals_that_passed_it() -> None:
    engine = fake_engine(pages=10, slots=8)
    engine.submit(request("holder", [1] * 200, 8))
    engine.step()
    engine.submit(request("heavy", [2] * (7 * 64), 1))
    for i in range(2):
        engine.submit(request(f"light{i}", [3 + i] * 100, 40))
    engine.step()
    assert names(engine) == ["holder", "light0", "light1"]
    finish(engine)
    assert engine.scheduler.preemptions == 0
    check_idle(engine)


def test_the_youngest_makes_room_and_nobody_takes_it() -> None:
    # Three of 2 pages each in a pool of 7: the first to open a third page takes the last free one.
    engine = fake_engine(pages=7, slots=8)
    for i, length in enumerate((122, 119, 116)):
        engine.submit(request(f"r{i}", [i + 1] * length, 60))
        engine.step()
    assert names(engine) == ["r0", "r1", "r2"]
    while engine.pages.free and engine.has_work:
        engine.step()
    engine.submit(request("late", [9], 5))
    while not engine.scheduler.preemptions and engine.has_work:
        engine.step()
        check_books(engine)
    # r2's second page is not handed to the newcomer in the step that took it away.
    assert names(engine) == ["r0", "r1"] and engine.pages.free == 1
    finish(engine)
    check_idle(engine)


def test_head_room_at_admission_doubles_with_each_preemption() -> None:
    engine = fake_engine(pages=20, slots=8, watermark=0.1)
    engine.submit(request("r", [1] * 64, 64 * 15))
    engine.step()
    (seq,) = engine.scheduler.running
    room = [engine.scheduler._pages_to_start(seq)]
    for _ in range(4):
        engine.scheduler.preempt(seq)
        room.append(engine.scheduler._pages_to_start(seq))
        engine.step()
    assert [free for _, free in room] == [2 + 2, 2 + 4, 2 + 8, 16, 16]  # 16 is all it can ever use
    engine.submit(request("next", [2] * (64 * 15), 100))  # 15 pages and 2 to grow, 18 are free
    engine.step()
    assert names(engine) == ["r", "next"]
    engine.submit(request("last", [3] * 64, 100))  # 1 page and 1 to grow, 3 are free
    engine.step()
    assert names(engine) == ["r", "next", "last"]
    engine.submit(request("waits", [3] * 10, 100))  # 1 page and 1 to grow, but the last grew
    engine.step()
    assert names(engine) == ["r", "next", "last"]


def test_urgent_one_takes_a_slot_at_once() -> None:
    # D11: both slots held by low priority; the urgent one is in the very next step.
    engine = fake_engine(slots=2)
    for i in range(2):
        engine.submit(request(f"low{i}", [i + 1], 200, priority=5))
    for _ in range(20):
        engine.step()
    engine.submit(request("high", [9], 5, priority=0))
    engine.step()
    assert names(engine) == ["high", "low0"]
    answers = finish(engine)
    for i in range(2):
        solo = fake_engine()
        solo.submit(request(f"low{i}", [i + 1], 200))
        assert finish(solo)[f"low{i}"].token_ids[-30:] == answers[f"low{i}"].token_ids[-30:]
    assert engine.scheduler.preemptions == 1


def test_without_priority_preemption_the_urgent_one_is_next() -> None:
    engine = fake_engine(slots=1, priority_preemption=False)
    engine.submit(request("low", [1], 20, priority=5))
    engine.step()
    engine.submit(request("normal", [2], 5))
    engine.submit(request("high", [9], 5, priority=-1))
    engine.step()
    assert names(engine) == ["low"]
    while names(engine) == ["low"]:
        engine.step()
    engine.step()
    assert names(engine) == ["high"]
    finish(engine)
    assert engine.scheduler.preemptions == 0


def test_low_priority_is_served_within_the_ageing_bound() -> None:
    # A steady stream of urgent requests: one that is a level lower waits ageing_steps, no more.
    engine = fake_engine(slots=1, ageing_steps=50)
    engine.submit(request("first", [1], 4))
    engine.step()
    engine.submit(request("low", [2], 4, priority=1))
    answers: dict[str, Answer] = {}
    for step in range(400):
        if step % 3 == 0:
            engine.submit(request(f"high{step}", [3], 4))
        collect(engine.step(), answers)
        if "low" in answers:
            break
    assert 40 < step < 50 * 4 + 20
    collect(engine.step(), answers)
    finish(engine, answers)
    assert answers["low"].finish_reason == "length"


def test_equal_pair_does_not_ping_pong() -> None:
    # D11: two equal ones that outgrow the pool together.
    for pages in (5, 6, 7):
        engine = fake_engine(pages=pages, slots=2)
        for i in range(2):
            engine.submit(request(f"r{i}", [i + 1] * 64, 250))
        finish(engine)
        assert engine.scheduler.preemptions <= 2
        check_idle(engine)


def test_preemptions_of_one_sequence_are_few() -> None:
    engine = fake_engine(pages=20, slots=8, model=FakeModel(check_cache=False))
    for i in range(8):
        engine.submit(request(f"r{i}", [i + 1] * 30, 600))
    worst = 0
    while engine.has_work:
        engine.step()
        worst = max([worst, *(s.preemptions for s in engine.scheduler.running)])
    assert worst <= 5  # log2 of the 10 pages each of them ends with, and one
    check_idle(engine)


def test_first_come_first_served_among_equals() -> None:
    engine = fake_engine(slots=2)
    for i in range(6):
        engine.submit(request(f"r{i}", [i], 3))
    order: list[str] = []
    while engine.has_work:
        engine.step()
        order += [n for n in names(engine) if n not in order]
    assert order == [f"r{i}" for i in range(6)]


def test_every_step_with_work_computes_something() -> None:
    engine = fake_engine(pages=8, slots=3, step_tokens=70)
    for i in range(20):
        engine.submit(request(f"r{i}", [i] * (1 + 37 * i % 200), 30 + i))
    while engine.has_work:
        before = engine.model.calls  # type: ignore[attr-defined]
        engine.step()
        assert engine.model.calls == before + 1  # type: ignore[attr-defined]
        assert engine.model.batches[-1].rows > 0  # type: ignore[attr-defined]
    check_idle(engine)
