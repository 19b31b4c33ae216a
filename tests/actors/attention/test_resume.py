"""An answer that one engine began and another ends is the answer of one undisturbed engine."""

from typing import Any

import msgspec
import numpy as np
import pytest

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, RequestRefused, TokenOutput
from tests.actors.attention.test_engine_model import Bench, prompt
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import EOS, Answer, check_books, check_idle, fake_engine, request

# What a continuation must get right, one thing at a time and all together.
CASES: dict[str, GenerateRequest] = {
    each.request_id: each
    for each in (
        request("greedy", [5, 6, 7], 70),
        request("page", list(range(64)), 66),
        request("page+1", [7] * 65, 64),
        request("long", [i % 97 for i in range(300)], 5),
        request("warm", [8, 9], 70, temperature=0.9, seed=2**64 - 1, top_p=0.9, min_p=0.01),
        request("bias", [6], 9, logit_bias={5: 6.0, 9: -3.0}, temperature=1.2, seed=4),
        request("penalties", [1, 2, 3] * 9, 40, frequency_penalty=1.5, presence_penalty=1.0,
                repetition_penalty=1.3),
        request("ends", [2, 4], 60, temperature=1.0, seed=2, ignore_eos=False, min_tokens=12,
                logit_bias={EOS: 4.0}, stop_token_ids=[50, 51]),
        request("scored", [4] * 130, 8, logprobs=3, prompt_logprobs=2),
        request("traced", [3] * 100, 66, want_routed_experts=True, logprobs=0),
        request("all", [i % 50 for i in range(129)], 70, temperature=0.8, seed=9, top_k=30,
                frequency_penalty=0.5, repetition_penalty=1.1, logit_bias={3: 2.0},
                min_tokens=40, ignore_eos=False, logprobs=2, prompt_logprobs=0,
                want_routed_experts=True),
    )
}  # fmt: skip


def deliver(engine: Engine, each: GenerateRequest) -> list[TokenOutput]:
    """The outputs of one request, one per token."""
    engine.submit(each)
    outputs: list[TokenOutput] = []
    while engine.has_work:
        outputs += engine.step()
    check_idle(engine)
    return outputs


def joined(outputs: list[TokenOutput]) -> Answer:
    answer = Answer()
    for output in outputs:
        answer.add(output)
    return answer


def resumed(each: GenerateRequest, outputs: list[TokenOutput]) -> GenerateRequest:
    ids = [token for output in outputs for token in output.token_ids]
    return msgspec.structs.replace(each, resume_ids=ids)


@pytest.mark.parametrize("step_tokens", [7, 64, 512])
@pytest.mark.parametrize("name", CASES)
def test_every_cut_continues_as_if_there_were_none(name: str, step_tokens: int) -> None:
    each = CASES[name]
    whole = deliver(fake_engine(step_tokens=step_tokens), each)
    expected = joined(whole)
    assert expected.finish_reason in ("stop", "length")
    cuts = set(range(len(whole)))
    if step_tokens != 512:
        cuts &= {0, 1, 2, 63, 64, 65, len(whole) - 1}
    for cut in sorted(cuts):
        engine = fake_engine(step_tokens=step_tokens)
        rest = deliver(engine, resumed(each, whole[:cut]))
        assert joined(whole[:cut] + rest) == expected
        assert all(output.prompt_tokens == len(each.prompt_ids) for output in rest)
        # Nothing is counted twice over the two engines.
        stats = engine.stats()
        assert stats.generation_tokens == len(whole) - cut
        assert stats.prompt_tokens == (0 if cut else len(each.prompt_ids))
        assert stats.recomputed_tokens == (len(each.prompt_ids) + cut - 1 if cut else 0)


def test_resumed_requests_beside_others_and_preempted() -> None:
    expected = {name: joined(deliver(fake_engine(), each)) for name, each in CASES.items()}
    parts = {name: deliver(fake_engine(), each) for name, each in CASES.items()}
    rng = np.random.default_rng(3)
    engine, answers = fake_engine(pages=32, slots=4), dict[str, Answer]()
    for name, outputs in parts.items():
        cut = int(rng.integers(len(outputs)))
        answers[name] = joined(outputs[:cut])
        engine.submit(resumed(CASES[name], outputs[:cut]))
    for step in range(20_000):
        if not engine.has_work:
            break
        running = engine.scheduler.running
        if running and step % 5 == 0 and engine.scheduler.preemptions < 60:
            engine.scheduler.preempt(running[step % len(running)])
        for output in engine.step():
            answers[output.request_id].add(output)
        check_books(engine)
    assert answers == expected
    check_idle(engine)


@pytest.mark.parametrize(
    ("ids", "params", "field"),
    [
        ([1, 97], {}, "resume_ids"),
        ([-1], {}, "resume_ids"),
        ([1] * 8, {}, "resume_ids"),
        ([1] * 9, {}, "resume_ids"),
        ([1], {"max_tokens": 0}, "resume_ids"),
        ([1, EOS], {"ignore_eos": False}, "resume_ids"),
        ([EOS, 1], {"ignore_eos": False, "min_tokens": 2}, "resume_ids"),
        ([1, 50], {"stop_token_ids": [50]}, "resume_ids"),
        ([1], {"temperature": 0.5}, "seed"),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name(
    ids: list[int], params: dict[str, Any], field: str
) -> None:
    engine = fake_engine()
    each = msgspec.structs.replace(request("r", [1, 2], **({"max_tokens": 8} | params)),
                                   resume_ids=ids)  # fmt: skip
    with pytest.raises(RequestRefused, match=field) as refused:
        engine.submit(each)
    assert refused.value.field == field
    check_idle(engine)


def test_an_end_id_that_is_ignored_and_one_token_left() -> None:
    whole = deliver(fake_engine(), request("r", [1], 6, logit_bias={EOS: 100.0}))
    assert [output.token_ids for output in whole] == [[EOS]] * 6
    rest = deliver(fake_engine(), resumed(request("r", [1], 6, logit_bias={EOS: 100.0}), whole[:5]))
    (last,) = rest
    assert (last.token_ids, last.finish_reason) == ([EOS], "length")


def test_the_pages_of_a_resumed_request_are_those_of_the_whole() -> None:
    # 128 prompt tokens and 65 new ones keep 192: three pages, to the last token.
    each = request("r", [i % 97 for i in range(128)], 65)
    whole = deliver(fake_engine(pages=3), each)
    for cut in (1, 63, 64):
        rest = deliver(fake_engine(pages=3), resumed(each, whole[:cut]))
        assert joined(whole[:cut] + rest) == joined(whole)


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("model")
    return Bench(write_checkpoint(folder, family=request.param, num_hidden_layers=4))


@pytest.mark.parametrize("length", [1, 64, 65, 150])
def test_the_real_model_continues_to_the_last_bit(bench: Bench, length: int) -> None:
    vocab = bench.config.vocab_size
    each = request("r", prompt(length, length, vocab), 68, temperature=0.8, seed=length, logprobs=2,
                   prompt_logprobs=1, repetition_penalty=1.1, want_routed_experts=True)  # fmt: skip
    whole = deliver(bench.engine(slots=2), each)
    for cut in (1, 2, 64, 67):
        engine = bench.engine(slots=2)
        for i in range(2):  # neighbours that come and go
            engine.submit(request(f"n{i}", [i + 1] * 70, 9 + i))
        engine.step()
        engine.submit(resumed(each, whole[:cut]))
        rest: list[TokenOutput] = []
        while engine.has_work:
            rest += [output for output in engine.step() if output.request_id == "r"]
        assert joined(whole[:cut] + rest) == joined(whole)


def test_a_cut_inside_a_long_prompt_starts_over(bench: Bench) -> None:
    """Nothing had been delivered when the engine was lost between two chunks of the prompt."""
    vocab = bench.config.vocab_size
    each = request("r", prompt(1, 300, vocab), 4, logprobs=1, prompt_logprobs=0)
    first = bench.engine(step_tokens=64)
    first.submit(each)
    assert first.step() == [] and 0 < first.scheduler.running[0].computed < 300
    first.fail("killed")
    assert joined(deliver(bench.engine(step_tokens=64), each)) == bench.alone(each)


def test_a_failed_engine_says_that_it_lost_its_requests() -> None:
    engine = fake_engine()
    engine.submit(request("r", [1], 9))
    assert [output.lost for output in engine.fail("no exchange")] == [True]
    bad = fake_engine()
    bad.submit(request("r", [1], 9, stop_token_ids=[]))
    bad.abort("r")
    assert [output.lost for output in bad.step()] == [False]


def test_a_new_engine_takes_over_after_a_failure() -> None:
    """Model and state outlive an engine: the next one over them finds what it needs."""
    whole = deliver(fake_engine(), CASES["all"])
    first = fake_engine()
    first.submit(CASES["all"])
    outputs = [output for _ in range(20) for output in first.step()]
    first.fail("the exchange broke")
    second = Engine(first.model, first.state, first.exchange, first.settings, [EOS])
    assert second.failed is None
    rest = deliver(second, resumed(CASES["all"], outputs))
    assert joined(outputs + rest) == joined(whole)
