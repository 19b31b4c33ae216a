"""Constrained sequences in an engine: among free ones, preempted, resumed, aborted, failing."""

import json
import threading
from concurrent.futures import Executor, Future
from typing import Any

import msgspec
import pytest

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, RequestRefused
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.matcher import Matcher
from expertmesh.actors.constraint.spec import Constraint, ConstraintError
from tests.support.constraints import grammars_of, small_vocabulary
from tests.support.engines import Answer, check_books, check_idle, collect, finish, request
from tests.support.fake_model import FakeModel

ASCII = small_vocabulary(*[chr(code) for code in range(32, 127)])
(END,) = ASCII.end_ids
PERSON = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "string", "maxLength": 9}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)
WORDS = Constraint("regex", "([a-c]{3} )*x")


def engine(
    pages: int = 64, slots: int = 8, grammars: Grammars | None = None, **more: Any
) -> Engine:
    model = FakeModel()
    grammars = grammars or grammars_of(ASCII)
    state = model.new_state(pages, slots)
    return Engine(model, state, None, EngineSettings(**more), [END], grammars)  # type: ignore[arg-type]


def bound(name: str, constraint: Constraint = PERSON, tokens: int = 120, **params: Any) -> (
    GenerateRequest
):  # fmt: skip
    params = {"ignore_eos": False, "temperature": 1.0, "seed": 1} | params
    each = request(name, [5, 6, 7], tokens, **params)
    return msgspec.structs.replace(each, constraint=constraint)


def alone(each: GenerateRequest, **more: Any) -> Answer:
    one = engine(**more)
    one.submit(each)
    answer = finish(one)[each.request_id]
    check_idle(one)
    return answer


def text(answer: Answer) -> str:
    ended = answer.finish_reason == "stop"
    ids = answer.token_ids[:-1] if ended else answer.token_ids
    return b"".join(ASCII.tokens[token] for token in ids).decode()


MIXED: list[GenerateRequest] = [
    bound("person", seed=2),
    bound("greedy", temperature=0.0, logit_bias={END: 100.0}),
    bound("words", WORDS, 40, seed=3, frequency_penalty=1.0, repetition_penalty=1.3),
    bound("warm", temperature=1.7, seed=4, top_p=0.9, min_p=0.01, logprobs=3),
    bound("late", WORDS, 60, seed=5, min_tokens=30, stop_token_ids=[10]),
    bound("cut", WORDS, 7, seed=9, ignore_eos=True),
    request("free", [9] * 70, 60, logprobs=2),
    request("drawn", [8], 50, temperature=0.8, seed=42),
    request("short", [4, 4], 12, ignore_eos=False, min_tokens=5),
    request("penal", [1, 2] * 40, 30, frequency_penalty=1.5, prompt_logprobs=1),
]


def test_a_constrained_text_has_its_form_and_ends() -> None:
    for seed in range(8):
        answer = alone(bound("r", seed=seed))
        assert answer.finish_reason == "stop" and answer.stop_reason is None
        assert answer.token_ids[-1] == END and answer.token_ids.count(END) == 1
        assert set(json.loads(text(answer))) == {"a", "b"}


def test_neighbours_do_not_show() -> None:
    expected = {each.request_id: alone(each) for each in MIXED}
    for order in (MIXED, MIXED[::-1]):
        together = engine()
        for each in order:
            together.submit(each)
        assert finish(together) == expected
        check_idle(together)
    # The free ones are as they would be without any grammar in the process.
    for each in MIXED[6:]:
        model = FakeModel()
        state = model.new_state(64, 8)
        plain = Engine(model, state, None, EngineSettings(), [END])  # type: ignore[arg-type]
        plain.submit(each)
        assert finish(plain)[each.request_id] == expected[each.request_id]


def test_preempted_and_resumed_equal_undisturbed() -> None:
    expected = {each.request_id: alone(each) for each in MIXED}
    for cut_at in (1, 4, 11):
        one, answers, step = engine(pages=32, slots=4), dict[str, Answer](), 0
        for each in MIXED:
            ids = expected[each.request_id].token_ids
            cut = min(cut_at, len(ids) - 1) if each.params.prompt_logprobs is None else 0
            one.submit(msgspec.structs.replace(each, resume_ids=ids[:cut]))
            head = expected[each.request_id]
            answers[each.request_id] = Answer(ids[:cut], head.logprobs[:cut])
        while one.has_work:
            step += 1
            running = one.scheduler.running
            if running and step % 5 == 0 and one.scheduler.preemptions < 40:
                one.scheduler.preempt(running[step % len(running)])
            collect(one.step(), answers)
            check_books(one)
        assert answers == expected
        check_idle(one)


def test_no_bias_lifts_a_forbidden_token_and_scores_are_the_model_s() -> None:
    biased = dict.fromkeys((0, 1, 90), 100.0)
    answer = alone(bound("r", WORDS, 9, logit_bias=biased, logprobs=2, temperature=0.0))
    assert set(text(answer)) <= set("abcx ")
    free = alone(request("f", [5, 6, 7], 1, logprobs=2))
    assert answer.logprobs[0].top == free.logprobs[0].top


def test_ends_that_are_put_off() -> None:
    free_end = Constraint("regex", "a*")
    lifted = {END: 100.0}
    assert text(alone(bound("r", free_end, logit_bias=lifted))) == ""
    answer = alone(bound("r", free_end, 30, logit_bias=lifted, min_tokens=10))
    assert text(answer) == "a" * 10 and answer.finish_reason == "stop"
    answer = alone(bound("r", free_end, 30, logit_bias=lifted, ignore_eos=True))
    assert text(answer) == "a" * 30 and answer.finish_reason == "length"
    # What is complete ends all the same: nothing else may come.
    for params in ({"min_tokens": 20}, {"ignore_eos": True}):
        answer = alone(bound("r", Constraint("choice", '["abc"]'), 30, **params))
        assert (text(answer), answer.finish_reason, answer.stop_reason) == ("abc", "stop", None)


def test_stop_ids_end_the_text_where_they_may_come() -> None:
    b = ASCII.tokens.index(b"b")
    answer = alone(
        bound("r", Constraint("regex", "aab?c"), stop_token_ids=[b], logit_bias={b: 9.0})
    )
    assert answer.token_ids[-1] == b and answer.stop_reason == b
    x = ASCII.tokens.index(b"x")
    answer = alone(bound("r", Constraint("regex", "aabc"), stop_token_ids=[x]))
    assert text(answer) == "aabc" and answer.stop_reason is None


def test_without_end_ids_the_last_id_ends() -> None:
    vocabulary = small_vocabulary(*[chr(code) for code in range(32, 127)])
    last = msgspec.structs.replace(vocabulary, end_ids=[96])
    model = FakeModel()
    state = model.new_state(8, 2)
    one = Engine(model, state, None, EngineSettings(), [], grammars_of(last))  # type: ignore[arg-type]
    one.submit(bound("r", Constraint("choice", '["ok"]')))
    answer = finish(one)["r"]
    assert (answer.token_ids[-1], answer.finish_reason, answer.stop_reason) == (96, "stop", None)


# --- what goes wrong ends its own request ------------------------------------------------------


def test_a_grammar_that_does_not_compile() -> None:
    one = engine()
    one.submit(bound("bad", Constraint("regex", "(", "structured_outputs.regex")))
    one.submit(bound("good", WORDS, 20))
    answers = finish(one)
    assert answers["bad"].finish_reason == "error" and not answers["bad"].lost
    assert (answers["bad"].error or "").startswith("structured_outputs.regex: ")
    assert answers["good"] == alone(bound("good", WORDS, 20))
    assert one.failed is None
    check_idle(one)
    assert one.stats().finished_error == 1


def test_what_keeps_a_grammar_from_being_compiled_is_no_end_of_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_thread(*arguments: Any) -> Matcher:
        raise RuntimeError("can't start new thread")

    one = engine()
    monkeypatch.setattr(Grammars, "_prepare", no_thread)
    one.submit(bound("r"))
    one.submit(request("free", [1], 5))
    (refused,) = [output for output in one.step() if output.request_id == "r"]
    assert (refused.finish_reason, refused.error_field, refused.lost) == ("error", None, False)
    assert "can't start new thread" in (refused.error or "")
    assert finish(one)["free"].finish_reason == "length" and one.failed is None
    check_idle(one)


def test_tokens_that_the_grammar_never_gave() -> None:
    one = engine()
    each = msgspec.structs.replace(bound("r", WORDS), resume_ids=[90, 91])
    one.submit(each)
    answer = finish(one)["r"]
    assert answer.finish_reason == "error" and "structured_outputs" in (answer.error or "")
    check_idle(one)


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_matcher_that_fails_on_the_way(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    calls = 0
    real = getattr(Matcher, method)

    def broken(self: Matcher, *arguments: Any) -> None:
        nonlocal calls
        calls += self.constraint == PERSON
        if calls == 3 and self.constraint == PERSON:
            raise ConstraintError("too many states")
        real(self, *arguments)

    expected = {each.request_id: alone(each) for each in MIXED[2:]}
    monkeypatch.setattr(Matcher, method, broken)
    one = engine()
    for each in [bound("doomed"), *MIXED[2:3], *MIXED[4:]]:
        one.submit(each)
    answers = finish(one)
    doomed = answers.pop("doomed")
    assert (doomed.finish_reason, doomed.lost) == ("error", False)
    assert doomed.error == "structured_outputs: too many states"
    assert one.failed is None and answers == {name: expected[name] for name in answers}
    check_idle(one)


def test_an_engine_without_a_tokenizer_refuses() -> None:
    model = FakeModel()
    plain = Engine(model, model.new_state(8, 2), None, EngineSettings(), [END])  # type: ignore[arg-type]
    with pytest.raises(RequestRefused, match="tokenizer") as refused:
        plain.submit(bound("r"))
    assert refused.value.field == "structured_outputs"
    check_idle(plain)


# --- compiling happens elsewhere ---------------------------------------------------------------


class Gate(Executor):
    """Runs nothing until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def submit(self, work: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            self.open.wait()
            try:
                future.set_result(work(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return future


def gated() -> tuple[Engine, Gate]:
    gate = Gate()
    return engine(grammars=Grammars(ASCII, gate)), gate


def settle(one: Engine, answers: dict[str, Answer]) -> dict[str, Answer]:
    """Until every name has ended."""
    while one.stats().waiting or one.has_work:
        assert one.arrived.wait(30)
        one.arrived.clear()
        finish(one, answers)
    return answers


def test_others_go_on_while_a_grammar_compiles() -> None:
    one, gate = gated()
    one.submit(bound("r", WORDS, 20))
    one.submit(request("free", [1], 5))
    answers = finish(one)
    assert set(answers) == {"free"} and one.stats().waiting == 1
    with pytest.raises(RequestRefused, match="in use"):
        one.submit(request("r", [1], 5))
    gate.open.set()
    assert settle(one, answers)["r"] == alone(bound("r", WORDS, 20))
    check_idle(one)


def test_aborted_and_failed_while_it_compiles() -> None:
    one, gate = gated()
    one.submit(bound("r", WORDS, 20))
    one.abort("r")
    assert finish(one)["r"].finish_reason == "abort"
    check_idle(one)
    one.submit(bound("r", WORDS, 20))  # the name is free again, whatever the first one's does
    gate.open.set()
    assert settle(one, {})["r"] == alone(bound("r", WORDS, 20))
    check_idle(one)
    one, gate = gated()
    one.submit(bound("r", WORDS, 20))
    assert [output.lost for output in one.fail("no exchange")] == [True]
    gate.open.set()
    check_idle(one)
