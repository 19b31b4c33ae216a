import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expertmesh.kernels.sampling import reference, torch_ops
from expertmesh.kernels.sampling.philox import counter_uniform, philox4x64
from tests.kernels.checks import assert_close, assert_rows_alone, randn, random_settings

NEG = float("-inf")


def settings(
    rows: int,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: float = 0.5,
) -> tuple[Tensor, ...]:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.full((rows,), uniform, dtype=torch.float64),
    )


@given(rows=st.integers(1, 8), vocabulary=st.integers(1, 200), seed=st.integers(0, 999))
def test_sample_matches_the_definition(rows: int, vocabulary: int, seed: int) -> None:
    logits = randn(rows, vocabulary, seed=seed) * 3
    chosen = random_settings(rows, vocabulary, seed)
    got = torch_ops.sample(logits, *chosen)
    assert got.dtype == torch.int64
    assert torch.equal(got, reference.sample(logits, *chosen))


@given(vocabulary=st.integers(2, 30), seed=st.integers(0, 999))
def test_ties_and_masked_ids(vocabulary: int, seed: int) -> None:
    """Few distinct logits, many -inf: the rules for ties, and a masked id is never drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 3, (6, vocabulary), generator=generator).float() * 2
    logits.masked_fill_(torch.rand(logits.shape, generator=generator) < 0.4, NEG)
    logits[:, seed % vocabulary] = 1.0
    chosen = random_settings(6, vocabulary, seed)
    got = torch_ops.sample(logits, *chosen)
    assert torch.equal(got, reference.sample(logits, *chosen))
    assert logits.gather(1, got.unsqueeze(1)).isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 9e-6, 1e-5, 1e-4])
def test_tiny_temperatures_are_argmax(temperature: float) -> None:
    logits = randn(50, 300) * 5
    for uniform in (0.0, 0.5, 1 - 2**-53):
        got = torch_ops.sample(logits, *settings(50, temperature, uniform=uniform))
        assert torch.equal(got, logits.argmax(-1))


def test_rows_without_a_finite_maximum_still_give_an_id() -> None:
    logits = torch.zeros(4, 5)
    logits[0], logits[1, 3], logits[2, 2] = NEG, float("inf"), float("nan")
    for temperature in (0.0, 1.0):
        got = torch_ops.sample(logits, *settings(4, temperature, uniform=0.99))
        assert got.tolist()[:3] == [0, 3, 2]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("vocabulary", [63, 64, 65, 1000])
def test_the_ends_of_the_unit_interval_stay_inside(uniform: float, vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), NEG)
    logits[0, 5:9], logits[1, -1], logits[2, 0] = 0.0, 0.0, 0.0
    got = torch_ops.sample(logits, *settings(3, uniform=uniform))
    assert got.tolist() == [5 if uniform == 0 else 8, vocabulary - 1, 0]


def test_filters_keep_what_they_should() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(101, 1)
    grid = torch.linspace(0, 1 - 1e-9, 101, dtype=torch.float64)

    def drawn(**kwargs: float) -> list[int]:
        chosen = settings(101, **kwargs)  # type: ignore[arg-type]
        return sorted(set(torch_ops.sample(logits, *chosen[:4], grid).tolist()))

    assert drawn() == [0, 1, 2, 3]
    assert drawn(top_k=2) == [0, 1]
    assert drawn(top_p=0.69) == [0, 1] and drawn(top_p=0.71) == [0, 1, 2]
    assert drawn(top_p=1e-9) == [0]
    assert drawn(min_p=0.6) == [0, 1] and drawn(min_p=1.0) == [0]
    # top_p sees what top_k left: 0.4 / 0.7 alone reaches 0.55.
    assert drawn(top_k=2, top_p=0.55) == [0]


def test_a_wide_nucleus_needs_the_full_sort() -> None:
    logits = randn(3, 3000) * 0.1
    chosen = (*settings(3, top_p=0.9)[:4], torch.tensor([0.1, 0.5, 0.999], dtype=torch.float64))
    assert torch.equal(torch_ops.sample(logits, *chosen), reference.sample(logits, *chosen))


def test_frequencies_follow_the_softmax() -> None:
    logits, draws = randn(1, 20), 20000
    uniform = torch.tensor([counter_uniform(3, i) for i in range(draws)], dtype=torch.float64)
    ids = torch_ops.sample(logits.expand(draws, -1), *settings(draws, 0.7)[:4], uniform)
    share = torch.bincount(ids, minlength=20).double() / draws
    expected = torch.softmax(logits[0].double() / 0.7, -1)
    assert float((share - expected).abs().max()) < 4 * math.sqrt(0.25 / draws)


@pytest.mark.parametrize("vocabulary", [17, 64, 321, 2048])
def test_rows_do_not_depend_on_companions(vocabulary: int) -> None:
    logits, chosen = randn(40, vocabulary) * 2, random_settings(40, vocabulary, 1)
    assert_rows_alone(lambda rows: torch_ops.sample(logits[rows], *(x[rows] for x in chosen)))
    assert_rows_alone(lambda rows: torch_ops.log_probs(logits[rows]))


@given(rows=st.integers(0, 4), vocabulary=st.integers(1, 70), seed=st.integers(0, 99))
def test_log_probs(rows: int, vocabulary: int, seed: int) -> None:
    logits = randn(rows, vocabulary, seed=seed) * 10
    assert_close(torch_ops.log_probs(logits), reference.log_probs(logits))
    logits[:, 1:2] = NEG
    assert (torch_ops.log_probs(logits)[:, 1:2] == NEG).all()


def test_philox_known_answers() -> None:
    for counter, key in ((0, 0), (1, 7), (12345, 2**64 - 1)):
        bits = np.random.Philox(counter=counter, key=key)
        # numpy counts up before its first block.
        expected = tuple(bits.random_raw(4).tolist())
        assert philox4x64((counter + 1, 0, 0, 0), (key, 0)) == expected


def test_counter_uniform_is_a_pure_function_in_range() -> None:
    values = [counter_uniform(seed, position) for seed in (0, -5, 2**70) for position in range(300)]
    assert all(0.0 <= v < 1.0 for v in values) and len(set(values)) == len(values)
    assert counter_uniform(1, 2) == counter_uniform(1, 2) != counter_uniform(2, 1)
    assert abs(sum(values) / len(values) - 0.5) < 0.05
