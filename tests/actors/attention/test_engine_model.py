"""The engine over real checkpoints: neighbours, chunks and preemption must not show.

Equality here is of bits: ids, and log-probabilities to the last digit.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.actors.attention.settings import EngineSettings
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import Answer, check_idle, collect, finish, request
from tests.support.golden import GOLDEN
from tests.support.runner import Runner


class Bench:
    """One loaded model; engines with fresh state over it."""

    def __init__(self, folder: Path) -> None:
        self.runner = Runner(folder, slots=1, pages_each=1, banks=2)
        self.config = self.runner.config

    def engine(self, pages: int = 128, slots: int = 32, **settings: Any) -> Engine:
        state = self.runner.model.new_state(pages, slots)
        for tensor in state.tensors():  # what is not written must not be read
            tensor.fill_(torch.nan if tensor.dtype.is_floating_point else 0)
        state.latents.zero_()
        return Engine(
            self.runner.model, state, self.runner.exchange, EngineSettings(**settings), []
        )

    def alone(self, each: GenerateRequest, **settings: Any) -> Answer:
        engine = self.engine(slots=1, **settings)
        engine.submit(each)
        return finish(engine)[each.request_id]


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("model")
    # KDA, KDA, KDA, MLA: every kind of layer once, and two blocks of residuals.
    return Bench(write_checkpoint(folder, family=request.param, num_hidden_layers=4))


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def mixed(vocab: int, count: int = 32) -> list[GenerateRequest]:
    lengths = [1, 2, 63, 64, 65, 128, 129, 200]
    return [
        request(f"r{i}", prompt(i, lengths[i % 8] + i // 8, vocab), 3 + i % 4, logprobs=2)
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["kimi_k3-tiny", "kimi_linear-tiny"])
@pytest.mark.parametrize("step_tokens", [8, 512])
def test_golden_ids(name: str, step_tokens: int) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    bench = Bench(GOLDEN / name)
    answer = bench.alone(
        request("r", expected["prompt_ids"], 24, want_routed_experts=True),
        step_tokens=step_tokens,
    )
    assert answer.token_ids == expected["greedy_ids"]
    routed = np.frombuffer(answer.routed, dtype="<i2").reshape(
        -1, len(bench.config.moe_layers), bench.config.experts_per_token
    )
    length = len(expected["prompt_ids"])
    assert len(routed) == length + 23
    by_layer = np.array(list(expected["routed_experts"].values()))
    assert (routed[:length].transpose(1, 0, 2) == by_layer).all()


def test_32_mixed_requests_together_equal_each_alone(bench: Bench) -> None:
    requests = mixed(bench.config.vocab_size)
    engine = bench.engine(step_tokens=256)
    for each in requests:
        engine.submit(each)
    answers = finish(engine)
    assert engine.failed is None
    for each in requests:
        assert answers[each.request_id] == bench.alone(each, step_tokens=256)
    check_idle(engine)


def test_preempted_equals_undisturbed(bench: Bench) -> None:
    vocab = bench.config.vocab_size
    requests = [
        request("greedy", prompt(1, 70, vocab), 40, logprobs=2),
        request("warm", prompt(2, 130, vocab), 25, temperature=0.8, seed=5, logprobs=1),
        request("nucleus", prompt(3, 5, vocab), 30, temperature=1.1, seed=6, top_p=0.8),
        request("penal", prompt(4, 64, vocab), 20, frequency_penalty=1.5,
                repetition_penalty=1.3, prompt_logprobs=1),
    ]  # fmt: skip
    engine, answers, step = bench.engine(), dict[str, Answer](), 0
    for each in requests:
        engine.submit(each)
    while engine.has_work:
        step += 1
        running = engine.scheduler.running
        if running and step % 11 == 0 and step < 70:
            engine.scheduler.preempt(running[step % len(running)])
        collect(engine.step(), answers)
    assert engine.scheduler.preemptions >= 4
    for each in requests:
        assert answers[each.request_id] == bench.alone(each)


def test_page_pressure_equals_undisturbed(bench: Bench) -> None:
    vocab = bench.config.vocab_size
    requests = [request(f"r{i}", prompt(i, 55, vocab), 30, temperature=0.9 * (i % 2), seed=i)
                for i in range(3)]  # fmt: skip
    engine = bench.engine(pages=4, slots=3)
    for each in requests:
        engine.submit(each)
    answers = finish(engine)
    assert engine.scheduler.preemptions > 0
    for each in requests:
        assert answers[each.request_id] == bench.alone(each)


@pytest.mark.parametrize("step_tokens", [1, 7, 63, 64, 65, 128])
def test_chunking_does_not_change_the_text(bench: Bench, step_tokens: int) -> None:
    # D2: k * 64 + 1 prompt tokens under every budget, beside running decodes.
    each = request("r", prompt(9, 129, bench.config.vocab_size), 12, logprobs=5)
    whole = bench.alone(each, step_tokens=4096)
    engine = bench.engine(step_tokens=step_tokens)
    for i in range(2):
        engine.submit(request(f"d{i}", [i + 1], 30))
    engine.step()
    engine.submit(each)
    pieces = finish(engine)["r"]
    assert pieces.token_ids == whole.token_ids
    for a, b in zip(pieces.logprobs, whole.logprobs, strict=True):
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert abs(a.logprob - b.logprob) < 1e-4
    if step_tokens >= 64:
        assert pieces == whole  # cuts on the 64 grid cost no bit


def test_ping_pong_equals_the_plain_loop(bench: Bench) -> None:
    requests = mixed(bench.config.vocab_size, 12)
    answers = []
    for ping_pong in (False, True):
        engine = bench.engine(ping_pong=ping_pong)
        for each in requests:
            engine.submit(each)
        answers.append(finish(engine))
        assert engine.failed is None
    assert answers[0] == answers[1]


def test_recycled_state_is_clean(bench: Bench) -> None:
    vocab = bench.config.vocab_size
    engine = bench.engine(pages=8, slots=2)
    for i in range(6):
        engine.submit(request(f"old{i}", prompt(i, 100, vocab), 5))
    finish(engine)
    engine.submit(request("tiny", [5], 10, logprobs=3))
    assert finish(engine)["tiny"] == bench.alone(request("tiny", [5], 10, logprobs=3))
