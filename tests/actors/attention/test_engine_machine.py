"""Random schedules in tiny pools: whatever neighbours do, an answer is the answer alone."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.actors.state.pages import pages_for
from tests.support.engines import (
    Answer,
    check_books,
    check_idle,
    collect,
    fake_engine,
    finish,
    request,
)

PAGES, SLOTS = 6, 3
STEP_TOKENS = (1, 5, 64, 100, 256)

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-7, 0.7, 1.5]),
        "seed": st.integers(0, 2**64 - 1),
        "top_k": st.sampled_from([-1, 1, 5]),
        "top_p": st.sampled_from([1e-9, 0.5, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logprobs": st.sampled_from([0, 2]),
        "prompt_logprobs": st.sampled_from([0, 1]),
        "want_routed_experts": st.booleans(),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-2, 2),
    },
)


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.step_tokens = 0
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.aborted: set[str] = set()
        self.steps = 0

    @precondition(lambda self: not self.step_tokens)
    @rule(step_tokens=st.sampled_from(STEP_TOKENS), max_bypass=st.integers(0, 2))
    def build(self, step_tokens: int, max_bypass: int) -> None:
        self.step_tokens = step_tokens
        self.engine = fake_engine(
            PAGES, SLOTS, step_tokens=step_tokens, max_bypass=max_bypass, ageing_steps=8
        )

    @precondition(lambda self: self.step_tokens)
    @rule(length=st.integers(1, 300), new=st.integers(0, 70), params=PARAMS)
    def submit(self, length: int, new: int, params: dict[str, Any]) -> None:
        name = f"r{len(self.requests)}"
        params = {"seed": len(self.requests)} | params
        prompt = [(length * 7 + i * 13) % 97 for i in range(length)]
        self.requests[name] = request(name, prompt, new, **params)
        self.engine.submit(self.requests[name])

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        name = f"r{which % len(self.requests)}"
        self.engine.abort(name)
        self.aborted.add(name)

    @precondition(lambda self: self.step_tokens)
    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            collect(self.engine.step(), self.answers)
            check_books(self.engine)

    @precondition(lambda self: self.step_tokens and self.engine.scheduler.running)
    @rule(which=st.integers(0, SLOTS - 1))
    def preempt(self, which: int) -> None:
        running = self.engine.scheduler.running
        self.engine.scheduler.preempt(running[which % len(running)])

    @invariant()
    def books_balance(self) -> None:
        if self.step_tokens:
            check_books(self.engine)

    def teardown(self) -> None:
        if not self.step_tokens:
            return
        # Progress: at worst everything runs one after the other, and once more per preemption.
        rows = sum(len(r.prompt_ids) + r.params.max_tokens for r in self.requests.values())
        finish(self.engine, self.answers, max_steps=10 * rows + 10)
        check_idle(self.engine)
        assert self.answers.keys() == self.requests.keys()
        for name, each in self.requests.items():
            answer = self.answers[name]
            assert answer.finishes == 1
            engine = fake_engine(
                pages_for(len(each.prompt_ids) + each.params.max_tokens), 1,
                step_tokens=self.step_tokens,
            )  # fmt: skip
            engine.submit(each)
            expected = finish(engine)[name]
            if answer.finish_reason == "abort":
                assert name in self.aborted
                assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            else:
                assert answer == expected


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=25, stateful_step_count=20)
