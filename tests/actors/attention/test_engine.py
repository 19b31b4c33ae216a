"""The engine over a model that notices every misplaced token, slot and page."""

import threading

import msgspec
import numpy as np
import pytest

from expertmesh.actors.attention.messages import (
    EngineBusy,
    EngineFailed,
    TokenLogprobs,
    TokenOutput,
)
from expertmesh.actors.attention.sequence import Sequence
from tests.support.engines import (
    EOS,
    Answer,
    check_books,
    check_idle,
    collect,
    fake_engine,
    finish,
    request,
)
from tests.support.fake_model import FakeModel

MIXED = [
    request("one", [5], 9),
    request("page", list(range(64)), 70),
    request("page+1", [7] * 65, 5),
    request("long", [i % 97 for i in range(700)], 12),
    request("score", [4] * 130, 0, prompt_logprobs=2),
    request("warm", [8, 9], 20, temperature=0.9, seed=11, top_p=0.9, min_p=0.01),
    request("hot", [8, 9], 20, temperature=1.3, seed=12, top_k=20),
    request("penal", [1, 2, 3], 40, frequency_penalty=1.5, presence_penalty=1.0,
            repetition_penalty=1.3, min_tokens=20, ignore_eos=False, logprobs=3),
    request("bias", [6], 5, logit_bias={5: 100.0}),
    request("traced", [3] * 100, 30, want_routed_experts=True, logprobs=0),
]  # fmt: skip


def alone(step_tokens: int = 512) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    for each in MIXED:
        engine = fake_engine(step_tokens=step_tokens)
        engine.submit(each)
        finish(engine, answers)
    return answers


@pytest.mark.parametrize("step_tokens", [1, 7, 63, 64, 65, 128, 4096])
def test_together_equals_alone(step_tokens: int) -> None:
    engine = fake_engine(step_tokens=step_tokens)
    for each in MIXED:
        engine.submit(each)
    assert finish(engine) == alone(step_tokens)
    check_idle(engine)


def test_lengths_stops_and_reasons() -> None:
    answers = alone()
    for each in MIXED:
        answer = answers[each.request_id]
        if each.request_id == "penal":
            assert len(answer.token_ids) >= 20
            continue
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == each.params.max_tokens
    assert answers["bias"].token_ids == [5] * 5
    assert [t.token_id for t in answers["penal"].logprobs] == answers["penal"].token_ids


@pytest.mark.parametrize("preempt_every", [1, 3, 10])
def test_preemption_changes_nothing(preempt_every: int) -> None:
    engine, answers = fake_engine(), dict[str, Answer]()
    for each in MIXED:
        engine.submit(each)
    for step in range(20_000):
        if not engine.has_work:
            break
        running = engine.scheduler.running
        if running and step % preempt_every == 0 and engine.scheduler.preemptions < 60:
            engine.scheduler.preempt(running[step % len(running)])
        collect(engine.step(), answers)
        check_books(engine)
    assert answers == alone()
    check_idle(engine)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens > 0
    assert stats.prompt_tokens == sum(len(each.prompt_ids) for each in MIXED)
    assert stats.generation_tokens == sum(len(a.token_ids) for a in answers.values())


def test_page_pressure_preempts_and_changes_nothing() -> None:
    # 12 pages, each request grows to 4: three fit, eight are served.
    requests = [request(f"r{i}", [i + 1] * (40 + i), 200, temperature=0.7, seed=i)
                for i in range(8)]  # fmt: skip
    expected: dict[str, Answer] = {}
    for each in requests:
        engine = fake_engine(pages=12)
        engine.submit(each)
        finish(engine, expected)
    engine = fake_engine(pages=12)
    for each in requests:
        engine.submit(each)
    answers: dict[str, Answer] = {}
    while engine.has_work:
        collect(engine.step(), answers)
        check_books(engine)
    assert answers == expected
    assert engine.scheduler.preemptions > 0
    check_idle(engine)


def test_recycled_slots_start_empty() -> None:
    # D1, D5: two slots, a long request, then one-token prompts beside running decodes.
    engine = fake_engine(slots=2)
    engine.submit(request("long", [9] * 150, 3))
    answers = finish(engine)
    for i in range(6):
        engine.submit(request(f"tiny{i}", [i], 4 + i))
    finish(engine, answers)
    for i in range(6):
        fresh = fake_engine(slots=2)
        fresh.submit(request("x", [i], 4 + i))
        assert finish(fresh)["x"] == answers[f"tiny{i}"]


def test_end_ids() -> None:
    plain = fake_engine()
    plain.submit(request("r", [5, 6], 60))
    text = finish(plain)["r"].token_ids
    stop = next(t for t in text[5:] if t != EOS)
    first = text.index(stop)

    def run(**params: object) -> Answer:
        engine = fake_engine()
        engine.submit(request("r", [5, 6], 60, **params))
        return finish(engine)["r"]

    stopped = run(stop_token_ids=[stop])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.token_ids == text[: first + 1]
    late = run(stop_token_ids=[stop], min_tokens=first + 1)
    assert late.token_ids[:first] == text[:first] and late.token_ids[first] != stop
    ended = run(logit_bias={EOS: 100.0}, ignore_eos=False)
    assert (ended.finish_reason, ended.stop_reason, ended.token_ids) == ("stop", None, [EOS])
    ignored = run(logit_bias={EOS: 100.0}, ignore_eos=True)
    assert ignored.token_ids == [EOS] * 60
    masked = run(logit_bias={EOS: 100.0}, ignore_eos=False, min_tokens=4)
    assert masked.token_ids.index(EOS) == 4


def test_scoring_a_prompt() -> None:
    answer = alone()["score"]
    assert (answer.token_ids, answer.finish_reason) == ([], "length")
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == 130
    assert answer.prompt_logprobs[0] is None
    assert all(p is not None and p.token_id == 4 and len(p.top) == 2
               for p in answer.prompt_logprobs[1:])  # fmt: skip


def test_routing_trace_covers_every_computed_position_once() -> None:
    rows = np.frombuffer(alone()["traced"].routed, dtype="<i2").reshape(-1, 2, 1)
    assert len(rows) == 100 + 30 - 1


def test_abort_anywhere() -> None:
    # D16: random moments, queued ones and the last step included; each ends exactly once.
    rng = np.random.default_rng(0)
    engine, answers = fake_engine(pages=24, slots=4), dict[str, Answer]()
    for i in range(400):
        engine.submit(request(f"r{i}", [i % 97] * int(rng.integers(1, 150)),
                              int(rng.integers(0, 12))))  # fmt: skip
    left = 400
    while engine.has_work:
        for i in rng.integers(0, 400, size=2):
            engine.abort(f"r{i}")
        engine.abort("nobody")
        collect(engine.step(), answers)
        check_books(engine)
        left -= 1
    assert len(answers) == 400
    assert all(a.finishes == 1 for a in answers.values())
    assert {a.finish_reason for a in answers.values()} == {"length", "abort"}
    stats = engine.stats()
    assert stats.finished_abort + stats.finished_length == 400
    check_idle(engine)


def test_a_failing_step_ends_everything_with_its_reason() -> None:
    engine = fake_engine(slots=2, model=FakeModel(fail_at=4))
    for i in range(5):
        engine.submit(request(f"r{i}", [i], 50))
    answers = finish(engine, max_steps=10)
    assert len(answers) == 5
    for answer in answers.values():
        assert answer.finish_reason == "error" and "the fake exchange broke" in str(answer.error)
    assert engine.failed == "RuntimeError: the fake exchange broke"
    with pytest.raises(EngineFailed, match="fake exchange broke"):
        engine.submit(request("late", [1]))
    engine.abort("r1")
    assert engine.step() == []
    check_idle(engine)
    assert engine.stats().finished_error == 5


def test_not_a_number_ends_one_request() -> None:
    # The row's pages are wiped too: a masked NaN in a recycled page would still be 0 * NaN.
    model = FakeModel(nan_tokens=frozenset({90}))
    engine = fake_engine(model=model)
    engine.submit(request("bad", [1, 90], 5))
    engine.submit(request("good", [1, 2], 5, temperature=0.8, seed=3))
    engine.submit(request("bad-warm", [1, 90], 5, temperature=0.8, seed=3, logprobs=2))
    engine.submit(request("bad-score", [1, 90, 2], 0, prompt_logprobs=0))
    engine.submit(request("bad-both", [1, 90, 2], 5, prompt_logprobs=0))
    answers = finish(engine)
    assert answers["bad-score"].finish_reason == answers["bad-both"].finish_reason == "error"
    assert answers["bad"].finish_reason == answers["bad-warm"].finish_reason == "error"
    assert "not finite in the prompt, at position 1" in str(answers["bad"].error)
    solo = fake_engine()
    solo.submit(request("good", [1, 2], 5, temperature=0.8, seed=3))
    assert finish(solo)["good"] == answers["good"]
    assert float(engine.state.latents.sum()) == (64 - 4) * 64
    check_idle(engine)


def test_what_ended_in_a_step_that_then_breaks_is_still_delivered() -> None:
    engine = fake_engine()
    engine.submit(request("ends", [1], 1))
    engine.submit(request("goes-on", [2], 9))
    deliver, seen = engine._deliver, []

    def breaks(seq: Sequence, token: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        if seen:
            raise OSError("out of paper")
        seen.append(seq)
        return deliver(seq, token, logprobs)

    engine._deliver = breaks  # type: ignore[method-assign]
    answers = finish(engine, max_steps=2)
    assert answers["ends"].finish_reason == "length"
    assert answers["goes-on"].error == "OSError: out of paper"
    check_idle(engine)


def test_full_queue_is_busy_not_refused() -> None:
    engine = fake_engine(slots=1, max_waiting=3)
    for i in range(3):
        engine.submit(request(f"r{i}", [1], 4))
    with pytest.raises(EngineBusy, match="3 requests are waiting"):
        engine.submit(request("r3", [1], 4))
    finish(engine)
    engine.submit(request("r3", [1], 4))
    assert finish(engine)["r3"].finish_reason == "length"


def test_no_plan_with_work_is_an_error_with_numbers() -> None:
    engine = fake_engine(pages=2)
    engine.pages.take(999, 2)  # a leak nobody knows of
    engine.submit(request("r", [1], 4))
    answer = finish(engine, max_steps=3)["r"]
    assert answer.finish_reason == "error"
    assert "0 of 2 pages" in str(engine.failed) and "EngineStalled" in str(engine.failed)


def test_tokens_in_line_are_those_not_yet_computed() -> None:
    engine = fake_engine(slots=2, step_tokens=64)
    engine.submit(request("long", [1] * 200, 4))
    engine.submit(msgspec.structs.replace(request("again", [2] * 10, 9), resume_ids=[5, 6]))
    engine.submit(request("waits", [3] * 30, 4))
    assert engine.stats().waiting_tokens == 200 + 12 + 30
    engine.step()
    assert engine.stats().waiting_tokens < 200 + 12 + 30
    finish(engine)
    assert engine.stats().waiting_tokens == 0


def test_submit_from_many_threads() -> None:
    engine, answers = fake_engine(pages=256, slots=8), dict[str, Answer]()

    def client(n: int) -> None:
        for i in range(25):
            engine.submit(request(f"{n}-{i}", [n, i], 3))
            if i % 5 == 0:
                engine.abort(f"{n}-{i}")

    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        collect(engine.step(), answers)
    assert len(answers) == 100 and all(a.finishes == 1 for a in answers.values())
    check_idle(engine)


class Joining:
    def __init__(self) -> None:
        self.joined = 0

    def join_step(self) -> None:
        self.joined += 1
        if self.joined == 3:
            raise RuntimeError("rank 2 is gone")


def test_joining_a_step_without_rows() -> None:
    engine = fake_engine()
    assert engine.join_step() == []  # nobody to join
    engine.exchange = exchange = Joining()  # type: ignore[assignment]
    assert engine.join_step() == engine.join_step() == []
    assert exchange.joined == 2 and engine.failed is None
    engine.submit(request("queued", [1]))
    assert [output.finish_reason for output in engine.join_step()] == ["error"]
    assert engine.failed == "RuntimeError: rank 2 is gone"
