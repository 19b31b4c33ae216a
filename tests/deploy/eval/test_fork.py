"""One text, read once, and what is asked of it: the same as if an engine had been asked."""

import math

import pytest
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.asking import Answer, ask
from expertmesh.deploy.eval.cases import Case, Maker, Probe
from expertmesh.deploy.eval.fork import WIDTH, Fork
from expertmesh.deploy.eval.reading import Mode, Near
from expertmesh.deploy.eval.subject import Subject
from expertmesh.deploy.eval.tasks import make

EXACT = Mode("exact")
TEXT = 2400


def greedy(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    params = SamplingParams(max_tokens=count, temperature=0.0, logprobs=0, ignore_eos=True)
    engine.submit(GenerateRequest("greedy", prompt, params))
    ids, logprobs = list[int](), list[float]()
    while engine.has_work:
        for output in engine.step():
            ids += output.token_ids
            logprobs += [one.logprob for one in output.logprobs or []]
    return ids, logprobs


def asked(subject: Subject, case: Case, mode: Mode = EXACT) -> list[Answer]:
    (found,) = ask(subject, [(0, case)], [mode], len(case.context))
    return found.answers


@pytest.fixture(scope="module")
def text(maker: Maker) -> list[int]:
    return list(make("single", maker, TEXT, 0, 0).context)


@pytest.mark.parametrize("reads", ["exact", "select"])
def test_what_an_engine_says_is_right_and_as_likely_as_it_reports(
    subject: Subject, text: list[int], reads: str
) -> None:
    state = StateSettings.model_validate(
        {"kv_mode": reads, "window_tokens": 128, "select_pages": 4, "host_bytes": 0}
    )
    settings = EngineSettings(pages=64, slots=2, step_tokens=1024, state=state)
    with subject.engine(settings) as engine:
        said, logprobs = greedy(engine, text, 6)
    other = (said[3] + 1) % subject.config.vocab_size
    whole = Probe(tuple(said), ((0, 6),), 0.0)
    wrong = Probe((*said[:3], other, *said[4:]), ((0, 4),), 0.0)
    unjudged = Probe((*said[:3], other, *said[4:]), ((1, 3),), 0.0)
    mode = Mode(reads, "select" if reads == "select" else "exact", state)
    found = asked(subject, Case(tuple(text), (whole, wrong, unjudged)), mode)
    assert [one.right for one in found] == [True, False, True]
    assert found[0].nats == pytest.approx(-math.fsum(logprobs), abs=1e-4)
    assert [one.greedy for one in found[1].tokens] == said[:4]


def test_questions_do_not_see_each_other_however_many_there_are(
    subject: Subject, text: list[int]
) -> None:
    probes = [Probe((7 + at, 9, 11), ((1, 3),), 0.0) for at in range(WIDTH + 2)]
    probes.append(Probe((7,) * 90, ((89, 90),), 0.0))  # which outlives the others, over two pages
    together = asked(subject, Case(tuple(text[:500]), tuple(probes)))
    for at in (0, WIDTH - 1, WIDTH, len(probes) - 1):
        (alone,) = asked(subject, Case(tuple(text[:500]), (probes[at],)))
        assert alone == together[at]  # to the last bit


def test_a_choice_is_made_among_the_given_tokens_only(subject: Subject, text: list[int]) -> None:
    best = asked(subject, Case(tuple(text[:300]), (Probe((0,), ((0, 1),), 0.0),)))[0].tokens[0]
    least = (best.greedy + 7) % subject.config.vocab_size
    alone = Probe((least,), ((0, 1),), 0.0, (least,))
    beaten = Probe((least,), ((0, 1),), 0.0, (least, best.greedy))
    found = asked(subject, Case(tuple(text[:300]), (alone, beaten)))
    assert [one.right for one in found] == [True, False]


def test_what_is_read_of_old_pages_decides_how_far_a_prediction_is_from_the_exact_one(
    subject: Subject, text: list[int]
) -> None:
    state = StateSettings(window_tokens=128, select_pages=4)
    modes = [EXACT, Mode("offload", "offload", state), Mode("select", "select", state),
             Mode("blind", "blind", state)]  # fmt: skip
    probe = Probe(tuple(range(5, 25)), ((1, 20),), 0.0)
    found = ask(subject, [(0, Case(tuple(text), (probe,)))], modes, len(text))
    apart = [sum(token.divergence for token in one.answers[0].tokens) for one in found]
    assert apart[0] == apart[1] == 0 < apart[2] < apart[3]
    exact, offload, select, blind = (one.held for one in found)
    assert exact.share == 1 and exact.host == 0
    # The first page and the last few are near; what has left is on the host.
    assert blind.near == offload.near == select.near < exact.near / 6
    assert offload.host == exact.whole - offload.near and blind.index == blind.host == 0
    assert select.index > 0 and select.recent <= 2 * 4 * subject.page_bytes
    reading = found[2].reading
    assert reading is not None and reading.per_step == 4 and reading.bound_kind == "estimate"
    assert found[1].reading is None


def test_nothing_old_is_read_by_what_is_blind(subject: Subject, text: list[int]) -> None:
    """Another text between the first page and the window says nothing, given the same state."""
    state = StateSettings(window_tokens=128)
    probe, said = Probe((5, 6, 7), ((1, 3),), 0.0), list[torch.Tensor]()
    fork = Fork(subject, TEXT)
    fork.read(text)
    for _ in range(2):
        said += fork.ask([probe], fork.reader(Mode("blind", "blind", state)))
        fork.latents[:, 64 : len(text) - 192] = 3.0
    assert torch.equal(*said)
    (exact,) = fork.ask([probe], fork.reader(EXACT))
    assert not torch.equal(exact, said[0])
    with pytest.raises(LookupError, match="old pages"):
        Near(rank=8).gather(0, fork.latents[0], [0], 64)


def test_what_there_is_no_room_for_is_refused(subject: Subject, text: list[int]) -> None:
    fork = Fork(subject, 256)
    for too_long in (text, []):
        with pytest.raises(ValueError, match="there is room for 4 pages"):
            fork.read(too_long)
    fork.read(text[:100])
    with pytest.raises(ValueError, match="a question of 300 tokens"):
        list(fork.ask([Probe((1,) * 300, ((1, 2),), 0.0)], fork.reader(EXACT)))
