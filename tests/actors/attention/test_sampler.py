"""Tokens and log-probabilities from given logits; rows must not feel one another."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.actors.attention.adjustments import adjust
from expertmesh.actors.attention.masks import Masks, forbid
from expertmesh.actors.attention.messages import (
    LOGPROB_FLOOR,
    GenerateRequest,
    SamplingParams,
)
from expertmesh.actors.attention.sampler import NO_TOKEN, Sampled, Sampler
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.constraint.matcher import words_for
from expertmesh.kernels.registry import load_kernels
from expertmesh.kernels.sampling import triton_ops
from expertmesh.kernels.sampling.torch_ops import counter_uniform, log_probs
from tests.support.fake_device import META, MetaUploads, one_device

V = 50
EOS = frozenset({3})


def sequence(prompt: list[int] | None = None, generated: list[int] | None = None,
             **params: Any) -> Sequence:  # fmt: skip
    params = {"max_tokens": 100, "temperature": 0.0} | params
    seq = Sequence(GenerateRequest("r", prompt or [1, 2], SamplingParams(**params)), 1, 0, EOS)
    for token in generated or []:
        seq.append(token)
    return seq


def logits(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(scope="module", params=["here", "there"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    """Reading the largest logits in the host's memory, or on a device, which this one plays."""
    made = Sampler(load_kernels("torch"))
    if request.param == "there":
        made._pick = made._pick_there
    return made


def drawn(sampler: Sampler, rows_BV: Tensor, *sequences: Sequence) -> Sampled:
    return sampler.sample(rows_BV.clone(), list(sequences))


def test_greedy_is_the_argmax(sampler: Sampler) -> None:
    rows = logits(5)
    assert drawn(sampler, rows, *[sequence()] * 5).ids == rows.argmax(1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("top_p", [1e-9, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, V])
def test_tiny_temperatures_are_greedy(
    sampler: Sampler, temperature: float, top_p: float, top_k: int
) -> None:
    # A12
    rows = logits(4, seed=1) * 10
    seqs = [sequence(temperature=temperature, top_p=top_p, top_k=top_k) for _ in range(4)]
    assert drawn(sampler, rows, *seqs).ids == rows.argmax(1).tolist()


def test_a_row_does_not_feel_its_neighbours(sampler: Sampler) -> None:
    # A13, A14: seeded beside unseeded, greedy beside sampled, penalised and masked rows.
    rows = logits(6, seed=2)

    def make() -> list[Sequence]:
        return [
            sequence(temperature=0.8, seed=42, logprobs=3),
            sequence(temperature=1.0),
            sequence(min_tokens=5, logprobs=1),
            sequence(temperature=1.2, seed=7, top_p=0.9, top_k=10, min_p=0.05),
            sequence(generated=[5, 5, 6], frequency_penalty=1.5, repetition_penalty=1.3),
            sequence(temperature=0.5, seed=0, logit_bias={4: 9.0}),
        ]

    together = drawn(sampler, rows, *make())
    order = [3, 5, 0, 2, 4, 1]
    swapped = drawn(sampler, rows[order], *[make()[i] for i in order])
    for row in (0, 2, 3, 4, 5):
        solo = drawn(sampler, rows[row : row + 1], make()[row])
        assert solo.ids[0] == together.ids[row] == swapped.ids[order.index(row)]
        assert solo.logprobs.get(0) == together.logprobs.get(row)


def test_draws_follow_seed_and_position_only(sampler: Sampler) -> None:
    rows = torch.zeros(1, V)
    seen = set()
    for length in range(40):
        text = [4] * length
        first = drawn(sampler, rows, sequence(generated=text, temperature=1.0, seed=9)).ids[0]
        again = drawn(sampler, rows, sequence(generated=text, temperature=1.0, seed=9)).ids[0]
        assert first == again
        seen.add(first)
    assert len(seen) > 15
    a, b = (drawn(sampler, rows, sequence(temperature=1.0, seed=s)).ids for s in (-1, 2**64 - 1))
    assert a == b  # seeds are taken modulo 2**64
    flat = torch.zeros(30, V)
    for seeds in ([None] * 30, range(30)):
        many = [sequence(temperature=1.0, seed=seed) for seed in seeds]
        assert len(set(drawn(sampler, flat, *many).ids)) > 10


def test_bias_and_mask(sampler: Sampler) -> None:
    rows = logits(1)
    assert drawn(sampler, rows, sequence(logit_bias={5: 100.0})).ids == [5]
    banned = int(rows.argmax())
    assert drawn(sampler, rows, sequence(logit_bias={banned: -100.0})).ids != [banned]
    masked = sequence(logit_bias={3: 100.0}, min_tokens=1)
    assert drawn(sampler, rows, masked).ids != [3]
    masked.append(7)
    assert drawn(sampler, rows, masked).ids == [3]


def test_penalties_follow_the_formula(sampler: Sampler) -> None:
    rows = logits(1, seed=3)
    seq = sequence(prompt=[1, 2, 2], generated=[2, 9, 9, 9], presence_penalty=0.5,
                   frequency_penalty=0.25, repetition_penalty=2.0, logprobs=V - 30)  # fmt: skip
    expected = rows[0].clone()
    for token in (1, 2, 9):
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    expected[2] -= 0.5 + 0.25 * 1
    expected[9] -= 0.5 + 0.25 * 3
    given = rows.clone()
    result = sampler.sample(given, [seq])
    torch.testing.assert_close(given[0], expected)
    assert result.ids == [int(expected.argmax())]
    # Reported are the model's own probabilities, without the penalties.
    own = rows.log_softmax(1)[0]
    report = result.logprobs[0]
    assert report.logprob == pytest.approx(float(own[report.token_id]))
    assert report.rank == int((own > own[report.token_id]).sum()) + 1
    assert [i for i, _ in report.top] == own.topk(V - 30).indices.tolist()


def test_many_penalised_tokens_outgrow_the_first_buffer(sampler: Sampler) -> None:
    seq = sequence(frequency_penalty=2.0)
    rows = torch.zeros(1, 300)
    for token in range(250):
        seq.append(token)
    assert drawn(sampler, rows, seq).ids == [250]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_finite_maximum_gives_no_token(sampler: Sampler, bad: float) -> None:
    rows = logits(3)
    rows[1] = bad
    for temperature in (0.0, 1.0):
        make = [sequence(temperature=temperature, seed=1, logprobs=2) for _ in range(3)]
        result = drawn(sampler, rows, *make)
        assert result.ids[1] == NO_TOKEN
        assert result.ids[0] != NO_TOKEN and result.ids[2] != NO_TOKEN


def test_impossible_tokens_have_the_floor(sampler: Sampler) -> None:
    # A25: nothing that JSON cannot carry.
    rows = torch.full((1, V), -math.inf)
    rows[0, 4] = 1.0
    report = drawn(sampler, rows, sequence(logprobs=3)).logprobs[0]
    assert (report.token_id, report.logprob, report.rank) == (4, 0.0, 1)
    assert [value for _, value in report.top] == [0.0, LOGPROB_FLOOR, LOGPROB_FLOOR]


def test_scoring_given_tokens(sampler: Sampler) -> None:
    rows = logits(3, seed=5)
    scored = sampler.score(rows, [4, 0, 49], 2)
    assert scored is not None
    own = rows.log_softmax(1)
    for row, (token, entry) in enumerate(zip([4, 0, 49], scored, strict=True)):
        assert entry.token_id == token and len(entry.top) == 2
        assert entry.logprob == pytest.approx(float(own[row, token]))
    assert [entry.top for entry in sampler.score(rows, [1, 2, 3], 0) or []] == [[], [], []]
    rows[1, 7] = math.nan
    assert sampler.score(rows, [1, 2, 3], 0) is None


def test_on_a_device_tokens_are_read_back_once() -> None:
    """Everything a step may ask for, up to the one place where the host must know."""
    uploads = MetaUploads()
    kernels = SimpleNamespace(
        sample=triton_ops.sample, log_probs=log_probs, counter_uniform=counter_uniform
    )
    sampler = Sampler(kernels, META, uploads)  # type: ignore[arg-type]
    sequences = [
        sequence(temperature=0.8, seed=42, top_p=0.9),
        sequence(generated=[5, 5, 6], frequency_penalty=1.5, min_tokens=9),
        sequence(logit_bias={4: 9.0}),
        sequence(),
    ]
    rows_BV = torch.empty(4, V, device=META)
    masks = Masks([3], np.zeros((1, words_for(V)), np.int32), None)
    with one_device() as (_, launches):
        adjust(rows_BV, [0, 1, 2], sequences, uploads)
        forbid(rows_BV, masks, uploads)
        picked = sampler._picked(rows_BV, [0], sequences)
        assert picked.shape == (2, 4) and picked.device == META
        with pytest.raises((RuntimeError, NotImplementedError)):
            sampler.sample(rows_BV, sequences, masks)
    assert launches
    plain = MetaUploads()
    with one_device():
        Sampler(kernels, META, plain)._picked(rows_BV, [], sequences)  # type: ignore[arg-type]
    assert not plain.sent, "greedy rows need nothing from the host"
