"""Teacher forcing through a real engine says the same as the engine's own greedy decoding."""

import math

import pytest

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.asking import Asker
from expertmesh.deploy.eval.cases import Case, Maker, Probe
from expertmesh.deploy.eval.driver import EngineEnded
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import make
from expertmesh.deploy.eval.teacher import Verdict

SETTINGS = EngineSettings(pages=64, slots=8, step_tokens=256)
UNCACHED = SETTINGS.model_copy(update={"state": StateSettings(prefix_cache=False, host_bytes=0)})


def greedy(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, logprobs=0, ignore_eos=True)
    engine.submit(GenerateRequest("greedy", prompt, params))
    ids, logprobs = list[int](), list[float]()
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
            logprobs += [one.logprob for one in output.logprobs or []]
    return ids, logprobs


def ask(engine: Engine, case: Case) -> list[tuple[bool, float, list[int]]]:
    return [told(answer.verdict) for answer in Asker(engine).ask([(0, case)])]


def told(verdict: Verdict) -> tuple[bool, float, list[int]]:
    return verdict.right, verdict.nats, [one.greedy for one in verdict.tokens]


def test_what_greedy_decoding_says_is_right_and_as_likely_as_it_reports(
    subject: Subject, maker: Maker
) -> None:
    context = list(make("single", maker, 300, 0, 0).context)
    with subject.engine(UNCACHED) as engine:
        said, logprobs = greedy(engine, context, 6)
        other = (said[3] + 1) % subject.config.vocab_size
        whole = Probe(tuple(said), ((0, 6),), 0.0)
        wrong = Probe((*said[:3], other, *said[4:]), ((0, 4),), 0.0)
        unjudged = Probe((*said[:3], other, *said[4:]), ((1, 3),), 0.0)
        found = ask(engine, Case(tuple(context), (whole, wrong, unjudged)))
    assert [right for right, _, _ in found] == [True, False, True]
    assert found[0][1] == pytest.approx(-math.fsum(logprobs), abs=1e-4)
    assert found[0][2] == said and found[1][2] == said[:4] and found[2][2] == said[1:3]


def test_what_is_said_next_follows_what_was_taught_and_not_what_was_meant(
    subject: Subject, maker: Maker
) -> None:
    context = list(make("single", maker, 300, 0, 0).context)
    with subject.engine(UNCACHED) as engine:
        said, _ = greedy(engine, context, 1)
        other = (said[0] + 1) % subject.config.vocab_size
        follows, _ = greedy(engine, [*context, other], 1)
        probe = Probe((other, follows[0]), ((1, 2),), 0.0)
        ((right, _, _),) = ask(engine, Case(tuple(context), (probe,)))
    assert right


def test_a_choice_is_made_among_the_given_tokens_only(subject: Subject, maker: Maker) -> None:
    context = list(make("single", maker, 300, 0, 0).context)
    with subject.engine(UNCACHED) as engine:
        said, _ = greedy(engine, context, 1)
        least = (said[0] + 7) % subject.config.vocab_size
        alone = Probe((least,), ((0, 1),), 0.0, (least,))
        beaten = Probe((least,), ((0, 1),), 0.0, (least, said[0]))
        found = ask(engine, Case(tuple(context), (alone, beaten)))
    assert [right for right, _, _ in found] == [True, False]


def test_a_known_prefix_changes_no_verdict(subject: Subject, maker: Maker) -> None:
    case = make("multikey", maker, 500, 1, 0)
    with subject.engine(UNCACHED) as engine:
        cold = ask(engine, case)
    with subject.engine(SETTINGS) as engine:
        warm = list(Asker(engine).ask([(0, case)]))
    # To the last bit.
    assert cold == [told(one.verdict) for one in warm]
    assert all(one.cached_tokens >= 384 for one in warm)


def test_an_engine_that_fails_is_told(
    subject: Subject, maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("no more")

    with subject.engine(UNCACHED) as engine:
        asker = Asker(engine)
        monkeypatch.setattr(engine, "_forward", broken)
        with pytest.raises(EngineEnded, match="no more"):
            list(asker.ask([(0, make("single", maker, 256, 0, 0))]))
