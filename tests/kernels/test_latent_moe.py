from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from expertmesh.kernels.latent_moe import grouped, reference, torch_ops
from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.linear.half import to_half
from expertmesh.kernels.linear.torch_ops import lay_out
from tests.kernels.checks import assert_close, assert_rows_alone, randn

GLUS = [Glu("situ", 4.0, 25.0), Glu("situ", 4.0), Glu("situ"), Glu("silu")]


@given(
    tokens=st.integers(0, 9),
    experts=st.integers(1, 40),
    top_k=st.integers(1, 6),
    renormalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_route(tokens: int, experts: int, top_k: int, renormalize: bool, seed: int) -> None:
    top_k = min(top_k, experts)
    logits, bias = randn(tokens, experts, seed=seed) * 2, randn(experts, seed=seed + 1)
    ids, weights = torch_ops.route(logits, bias, top_k, renormalize, 2.5)
    expected = reference.route(logits, bias, top_k, renormalize, 2.5)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected[0])
    assert_close(weights, expected[1])


def test_route_bias_selects_but_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 9.0, 0.0, 5.0])
    ids, weights = torch_ops.route(logits, bias, 2, True, 1.0)
    assert ids.tolist() == [[1, 3]] and weights.tolist() == [[0.5, 0.5]]


def test_route_survives_saturated_scores() -> None:
    ids, weights = torch_ops.route(torch.full((2, 5), -1e4), torch.zeros(5), 3, True, 1.0)
    assert weights.isfinite().all() and len(set(ids[0].tolist())) == 3


@pytest.mark.parametrize("experts", [7, 8, 13, 32, 897])
def test_route_rows_do_not_depend_on_companions(experts: int) -> None:
    logits, bias = randn(40, experts), randn(experts, seed=1)
    assert_rows_alone(lambda rows: torch_ops.route(logits[rows], bias, 4, True, 2.4)[1])
    assert_rows_alone(lambda rows: torch_ops.route(logits[rows], bias, 4, True, 2.4)[0])


@pytest.mark.parametrize("spec", GLUS, ids=str)
@pytest.mark.parametrize("width", [1, 5, 16, 32, 96])
def test_glu(spec: Glu, width: int) -> None:
    x = randn(40, 2 * width) * torch.logspace(-2, 2, 40).unsqueeze(1)
    assert_close(torch_ops.glu(x, spec), reference.glu(x, spec))
    assert_rows_alone(lambda rows: torch_ops.glu(x[rows], spec))
    low = torch_ops.glu(x.bfloat16(), spec)
    assert_close(low, reference.glu(x.bfloat16(), spec), 2**-7)


def make_experts(count: int, width: int, hidden: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (
            randn(2 * hidden, width, seed=seed + e) / width**0.5,
            randn(width, hidden, seed=seed + e + 500) / hidden**0.5,
        )
        for e in range(count)
    ]


def draw_ids(tokens: int, experts: int, top_k: int, local: float, seed: int) -> Tensor:
    """Distinct experts per token, each local with probability `local` (else -1)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :top_k]
    return ids.masked_fill(torch.rand(ids.shape, generator=generator) >= local, -1)


@given(
    tokens=st.integers(0, 12),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 5),
    local=st.sampled_from([0.0, 0.3, 1.0]),
    spec=st.sampled_from(GLUS),
    seed=st.integers(0, 99),
)
def test_partial_sum(
    tokens: int, experts: int, top_k: int, local: float, spec: Glu, seed: int
) -> None:
    top_k = min(top_k, experts)
    weights_of = make_experts(experts, 24, 16, seed).__getitem__
    z, ids = randn(tokens, 24, seed=seed), draw_ids(tokens, experts, top_k, local, seed)
    weights = randn(tokens, top_k, seed=seed + 3).masked_fill(ids < 0, float("nan"))
    for sum_dtype in (torch.float32, torch.float64):
        args = (z, ids, weights, weights_of, spec)
        got = torch_ops.experts_partial_sum(*args, sum_dtype=sum_dtype)
        expected = reference.experts_partial_sum(*args, sum_dtype=sum_dtype)
        assert got.dtype == expected.dtype == sum_dtype
        assert_close(got, expected)
        assert bool((got[(ids < 0).all(-1)] == 0).all())


def test_only_hit_experts_are_asked_for_their_weights() -> None:
    experts, asked = make_experts(6, 16, 16, 0), []

    def weights_of(slot: int) -> tuple[Tensor, Tensor]:
        asked.append(slot)
        return experts[slot]

    ids = torch.tensor([[4, 1], [1, -1], [-1, -1]])
    torch_ops.experts_partial_sum(randn(3, 16), ids, torch.ones(3, 2), weights_of, GLUS[0])
    assert asked == [1, 4]


@pytest.mark.parametrize("top_k", [1, 3, 4])
@pytest.mark.parametrize("kept", ["as stored", "laid out", "in float16", "mixed"])
@pytest.mark.parametrize(("width", "hidden"), [(32, 48), (64, 96), (128, 32)])
def test_partial_sum_rows_do_not_depend_on_companions(
    top_k: int, kept: str, width: int, hidden: int
) -> None:
    experts: list[Any] = [
        (w13.bfloat16().float(), w2.bfloat16().float())
        for w13, w2 in make_experts(7, width, hidden, 0)
    ]
    if kept == "laid out":
        experts = [(lay_out(w13), lay_out(w2)) for w13, w2 in experts]
    elif kept != "as stored":
        first = 0 if kept == "in float16" else 3
        experts[first:] = [(to_half(w13), to_half(w2)) for w13, w2 in experts[first:]]
    weights_of = experts.__getitem__
    z, ids = randn(40, width), draw_ids(40, 7, top_k, 0.7, 1)
    weights = randn(40, top_k, seed=2)
    assert_rows_alone(
        lambda rows: torch_ops.experts_partial_sum(
            z[rows], ids[rows], weights[rows], weights_of, GLUS[0]
        )
    )


def test_partial_sum_does_not_depend_on_slot_numbers() -> None:
    experts, moved = make_experts(7, 32, 32, 0), torch.tensor([3, 0, 6, 5, 1, 4, 2])
    z, ids, weights = randn(9, 32), draw_ids(9, 7, 3, 1.0, 1), randn(9, 3, seed=2)
    before = torch_ops.experts_partial_sum(z, ids, weights, experts.__getitem__, GLUS[0])
    after = torch_ops.experts_partial_sum(
        z, moved[ids], weights, lambda slot: experts[moved.tolist().index(slot)], GLUS[0]
    )
    assert torch.equal(before, after)


@given(parts=st.integers(1, 6), seed=st.integers(0, 999))
def test_float64_sums_of_any_split_round_to_the_same_float32(parts: int, seed: int) -> None:
    weights_of = make_experts(9, 24, 16, seed).__getitem__
    z, ids, weights = randn(7, 24), draw_ids(7, 9, 8, 1.0, seed), randn(7, 8, seed=seed)
    weights *= torch.logspace(-4, 4, 8)  # terms of very different size

    def sums(mine: Tensor) -> Tensor:
        args = (z, mine, weights, weights_of, GLUS[0])
        return torch_ops.experts_partial_sum(*args, sum_dtype=torch.float64)

    owner = torch.randint(parts, ids.shape, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(parts, generator=torch.Generator().manual_seed(seed)).tolist()
    total = torch.zeros(7, 24, dtype=torch.float64)
    for part in order:
        total += sums(ids.masked_fill(owner != part, -1))
    assert torch.equal(total.float(), sums(ids).float())


def test_bf16_activations_give_a_float32_sum() -> None:
    experts = [(a.bfloat16(), b.bfloat16()) for a, b in make_experts(4, 32, 32, 0)]
    z, ids = randn(5, 32).bfloat16(), draw_ids(5, 4, 2, 1.0, 1)
    args = (z, ids, torch.rand(5, 2), experts.__getitem__, GLUS[0])
    assert_close(torch_ops.experts_partial_sum(*args), reference.experts_partial_sum(*args), 2e-2)


def test_bf16_rows_do_not_depend_on_companions_where_no_cpu_multiplies_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_ops, "native_bf16", lambda: False)
    experts: list[Any] = [(a.bfloat16(), b.bfloat16()) for a, b in make_experts(7, 64, 48, 0)]
    experts[3:] = [(to_half(w13.float()), to_half(w2.float())) for w13, w2 in experts[3:]]
    z, ids = randn(40, 64).bfloat16(), draw_ids(40, 7, 2, 0.7, 1)
    weights, weights_of = randn(40, 2, seed=2), experts.__getitem__
    assert_rows_alone(
        lambda rows: torch_ops.experts_partial_sum(
            z[rows], ids[rows], weights[rows], weights_of, GLUS[0]
        )
    )


def test_experts_kept_in_float16_give_what_dense_ones_do() -> None:
    dense = [(a.bfloat16().float(), b.bfloat16().float()) for a, b in make_experts(5, 64, 48, 0)]
    halves = [(to_half(w13), to_half(w2)) for w13, w2 in dense]
    args = (randn(33, 64), draw_ids(33, 5, 3, 0.8, 1), randn(33, 3, seed=2).abs())
    got = torch_ops.experts_partial_sum(*args, halves.__getitem__, GLUS[0])
    assert_close(got, reference.experts_partial_sum(*args, dense.__getitem__, GLUS[0]))


def test_two_threads_compute_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [
        (to_half(w13.bfloat16().float()), to_half(w2.bfloat16().float()))
        for w13, w2 in make_experts(5, 64, 48, 0)
    ]
    args = (randn(33, 64), draw_ids(33, 5, 3, 0.8, 1), randn(33, 3, seed=2))

    def compute() -> Tensor:
        with torch.inference_mode():
            return torch_ops.experts_partial_sum(*args, experts.__getitem__, GLUS[0])

    alone = compute()
    threads = torch.get_num_threads()
    monkeypatch.setattr(grouped, "WORTH_BYTES", 0)
    torch.set_num_threads(2)
    try:
        assert torch.equal(compute(), alone)
    finally:
        torch.set_num_threads(threads)
