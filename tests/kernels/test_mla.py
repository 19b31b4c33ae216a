from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertmesh.kernels.mla import reference, torch_ops
from expertmesh.kernels.mla.types import PAGE, MlaSpan
from tests.kernels.checks import assert_close, assert_rows_alone, randn

SCALE = 0.3


@dataclass
class Case:
    """B sequences in a shared cache whose unwritten rows are NaN; pages in shuffled order."""

    cache: Tensor
    table: Tensor
    lengths: Tensor
    q_latent: Tensor
    q_rope: Tensor

    def decode(self, ops, rows: Tensor, **kwargs: object) -> Tensor:  # type: ignore[no-untyped-def]
        return ops.mla_decode(
            self.q_latent[rows], self.q_rope[rows], self.cache, self.table[rows],
            self.lengths[rows], SCALE, **kwargs,
        )  # fmt: skip


def make_case(lengths: list[int], heads: int, rank: int, rope: int, seed: int = 0) -> Case:
    counts = [-(-length // PAGE) for length in lengths]
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(sum(counts) + 1, generator=generator).tolist()
    cache = torch.full(((sum(counts) + 1) * PAGE, rank + rope), float("nan"))
    # Table entries behind a row's last page name a page that nobody has written.
    nobody = free.pop()
    table = torch.full((len(lengths), max(counts) + 1), nobody)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for n in range(count):
            table[row, n] = free.pop()
            used = min(PAGE, length - n * PAGE)
            start = int(table[row, n]) * PAGE
            cache[start : start + used] = randn(used, rank + rope, seed=seed + 100 * row + n)
    return Case(
        cache,
        table,
        torch.tensor(lengths),
        randn(len(lengths), heads, rank, seed=seed + 1),
        randn(len(lengths), heads, rope + 3, seed=seed + 2)[:, :, :rope],  # strided
    )


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    rank=st.integers(1, 24),
    rope=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_decode(lengths: list[int], heads: int, rank: int, rope: int, seed: int) -> None:
    case = make_case(lengths, heads, rank, rope, seed)
    every = torch.arange(len(lengths))
    expected = case.decode(reference, every)
    assert_close(case.decode(torch_ops, every), expected)
    plan = torch_ops.mla_plan(case.table, case.lengths)
    assert torch.equal(case.decode(torch_ops, every, plan=plan), case.decode(torch_ops, every))


@pytest.mark.parametrize("lengths", [[0, 0], [65, 0, 3], [0, 64, 1], [0, 130]])
def test_decode_of_padding_gives_zeros(lengths: list[int]) -> None:
    case = make_case(lengths, 3, 16, 8)
    every = torch.arange(len(lengths))
    got = case.decode(torch_ops, every)
    assert_close(got, case.decode(reference, every))
    assert (got[torch.tensor(lengths) == 0] == 0).all()
    real = torch.tensor(lengths).nonzero().flatten()
    if len(real):
        assert torch.equal(case.decode(torch_ops, real), got[real])


def test_decode_with_one_huge_score() -> None:
    case = make_case([130, 64], 2, 16, 8)
    case.q_latent *= 1e4
    got = case.decode(torch_ops, torch.arange(2))
    assert_close(got, case.decode(reference, torch.arange(2)))


@pytest.mark.parametrize(("heads", "rank", "rope"), [(4, 64, 32), (1, 32, 16), (8, 512, 64)])
def test_decode_rows_do_not_depend_on_companions(heads: int, rank: int, rope: int) -> None:
    """Also not on the padding of the table nor on how many pages are gathered at a time."""
    lengths = [1 + (37 * i) % (300 if i % 5 else 60) for i in range(40)]
    case = make_case(lengths, heads, rank, rope)
    assert_rows_alone(lambda rows: case.decode(torch_ops, rows))


def test_decode_bits_do_not_depend_on_the_page_numbers() -> None:
    case = make_case([150, 64, 65], 4, 32, 16)
    every, shuffle = torch.arange(3), torch.randperm(len(case.cache) // PAGE)
    before = case.decode(torch_ops, every)
    moved = torch.empty_like(case.cache)
    moved.view(-1, PAGE, 48)[shuffle] = case.cache.view(-1, PAGE, 48)
    case.cache, case.table = moved, shuffle[case.table]
    assert torch.equal(case.decode(torch_ops, every), before)


def make_weights(heads: int, nope: int, value: int, rank: int) -> tuple[Tensor, Tensor]:
    return (
        randn(heads, nope, rank, seed=70) / rank**0.5,
        randn(heads, value, rank, seed=71) / rank**0.5,
    )


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    tail=st.integers(1, 80),
    gap=st.integers(0, 2),
    heads=st.integers(1, 4),
    nope=st.sampled_from([3, 8]),
    value=st.sampled_from([4, 5]),
    seed=st.integers(0, 99),
)
def test_prefill(
    lengths: list[int], tail: int, gap: int, heads: int, nope: int, value: int, seed: int
) -> None:
    """Spans are the last `tail` tokens of their context; rows outside are NaN and stay unread."""
    rank, rope = 12, 4
    case = make_case(lengths, heads, rank, rope, seed)
    weights = make_weights(heads, nope, value, rank)
    spans, row = [], gap
    for number, length in enumerate(lengths):
        count = min(tail, length)
        spans.append(MlaSpan(row, row + count, length - count, case.table[number]))
        row += count + gap
    q_nope = torch.full((row, heads, nope), float("nan"))
    q_rope = torch.full((row, heads, rope), float("nan"))
    outside = torch.ones(row, dtype=torch.bool)
    for span in spans:
        rows = slice(span.row_begin, span.row_end)
        outside[rows] = False
        q_nope[rows] = randn(span.row_end - span.row_begin, heads, nope, seed=seed + 5)
        q_rope[rows] = randn(span.row_end - span.row_begin, heads, rope, seed=seed + 6)
    args = (q_nope, q_rope, case.cache, *weights, spans, SCALE)
    got, expected = torch_ops.mla_prefill(*args), reference.mla_prefill(*args)
    assert_close(got, expected)
    assert bool((got[outside] == 0).all())
    # What a GPU runs, on this device: all heads at once, then as many as fit in 4 KB.
    for at_once in (torch_ops.EXPANDED_BYTES, 1 << 12):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_ops, "_prefill_span", torch_ops._prefill_span_fused)
            patch.setattr(torch_ops, "EXPANDED_BYTES", at_once)
            got = torch_ops.mla_prefill(*args)
        assert_close(got, expected)
        assert bool((got[outside] == 0).all())


@pytest.mark.parametrize("cuts", [[64], [128, 192], [1], [7, 8], [65], [1, 2, 3, 66, 130, 229]])
def test_prefill_cut_anywhere_is_bit_identical(cuts: list[int]) -> None:
    case = make_case([230], 4, 64, 32)
    weights = make_weights(4, 32, 32, 64)
    q_nope, q_rope = randn(230, 4, 32), randn(230, 4, 32, seed=1)
    pages = case.table[0]
    whole = torch_ops.mla_prefill(
        q_nope, q_rope, case.cache, *weights, [MlaSpan(0, 230, 0, pages)], SCALE
    )
    edges, parts = [0, *cuts, 230], []
    for begin, end in pairwise(edges):
        later = case.cache.clone()  # what a chunk has not reached yet is not written yet
        behind = torch.arange(end, 4 * PAGE)
        later[pages[behind // PAGE] * PAGE + behind % PAGE] = float("nan")
        span = MlaSpan(0, end - begin, begin, pages)
        parts.append(
            torch_ops.mla_prefill(
                q_nope[begin:end], q_rope[begin:end], later, *weights, [span], SCALE
            )
        )
    assert torch.equal(torch.cat(parts), whole)


def test_prefill_spans_do_not_depend_on_companions() -> None:
    case = make_case([230, 64, 3, 70], 4, 64, 32)
    weights = make_weights(4, 32, 32, 64)
    q_nope, q_rope = randn(200, 4, 32), randn(200, 4, 32, seed=1)
    spans = [
        MlaSpan(0, 100, 130, case.table[0]),
        MlaSpan(101, 165, 0, case.table[1]),
        MlaSpan(165, 168, 0, case.table[2]),
        MlaSpan(180, 182, 68, case.table[3]),
    ]
    whole = torch_ops.mla_prefill(q_nope, q_rope, case.cache, *weights, spans, SCALE)
    for span in spans:
        alone = torch_ops.mla_prefill(q_nope, q_rope, case.cache, *weights, [span], SCALE)
        rows = slice(span.row_begin, span.row_end)
        assert torch.equal(alone[rows], whole[rows])


def test_absorbed_decode_equals_expanded_prefill() -> None:
    case = make_case([100, 129], 3, 32, 8)
    w_k, w_v = make_weights(3, 16, 16, 32)
    q_nope, q_rope = randn(2, 3, 16), randn(2, 3, 8, seed=1)
    case.q_latent = torch.einsum("bhd,hdr->bhr", q_nope, w_k)
    case.q_rope = q_rope
    latent = case.decode(torch_ops, torch.arange(2))
    spans = [MlaSpan(i, i + 1, int(case.lengths[i]) - 1, case.table[i]) for i in range(2)]
    expanded = torch_ops.mla_prefill(q_nope, q_rope, case.cache, w_k, w_v, spans, SCALE)
    assert_close(torch.einsum("bhr,hvr->bhv", latent, w_v), expanded)


def test_bf16_cache() -> None:
    case = make_case([100, 20], 3, 32, 8)
    case.cache, case.q_latent = case.cache.bfloat16(), case.q_latent.bfloat16()
    case.q_rope = case.q_rope.bfloat16()
    got = case.decode(torch_ops, torch.arange(2))
    assert_close(got, case.decode(reference, torch.arange(2)), 2e-2)
    w_k, w_v = (w.bfloat16() for w in make_weights(3, 16, 16, 32))
    args = (randn(20, 3, 16).bfloat16(), randn(20, 3, 8).bfloat16(), case.cache, w_k, w_v)
    spans = [MlaSpan(0, 20, 0, case.table[1])]
    got = torch_ops.mla_prefill(*args, spans, SCALE)
    assert_close(got, reference.mla_prefill(*args, spans, SCALE), 3e-2)
