"""The last rows of a prompt, which prefill computes in the absorbed form."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertmesh.kernels.mla import absorbed, reference, torch_ops
from expertmesh.kernels.mla.types import NO_TAIL, PAGE, MlaSpan
from tests.kernels.checks import assert_close, randn
from tests.kernels.test_mla import SCALE, Case, make_case, make_weights

Prompt = tuple[Tensor, Tensor, Case, tuple[Tensor, Tensor]]


def make_prompt(length: int, heads: int = 4, rank: int = 64, rope: int = 32) -> Prompt:
    """Queries of all positions, what they look at, and the weights."""
    queries = randn(length, heads, 32), randn(length, heads, rope, seed=1)
    return *queries, make_case([length], heads, rank, rope), make_weights(heads, 32, 32, rank)


def run(prompt: Prompt, begin: int, end: int, tail: int) -> Tensor:
    """Rows begin..end as one span. What a chunk has not reached yet is not written yet."""
    q_nope, q_rope, case, weights = prompt
    pages, cache = case.table[0], case.cache.clone()
    behind = torch.arange(end, len(pages) * PAGE)
    cache[pages[behind // PAGE] * PAGE + behind % PAGE] = float("nan")
    span = MlaSpan(0, end - begin, begin, pages, tail)
    return torch_ops.mla_prefill(
        q_nope[begin:end], q_rope[begin:end], cache, *weights, [span], SCALE
    )


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    rows=st.integers(1, 140),
    tail=st.sampled_from([0, PAGE, 2 * PAGE, 4 * PAGE]),
    gap=st.integers(0, 2),
    heads=st.integers(1, 4),
    keys=st.sampled_from([PAGE, 2 * PAGE, absorbed.KEYS]),
    seed=st.integers(0, 99),
)
def test_tail(
    lengths: list[int], rows: int, tail: int, gap: int, heads: int, keys: int, seed: int
) -> None:
    """Spans are the last `rows` tokens of their context, below, across or behind the tail's begin;
    also as a GPU runs what lies below it."""
    case = make_case(lengths, heads, 12, 4, seed)
    spans, row = [], gap
    for number, length in enumerate(lengths):
        count = min(rows, length)
        spans.append(MlaSpan(row, row + count, length - count, case.table[number], tail))
        row += count + gap
    queries = randn(row, heads, 8, seed=seed + 5), randn(row, heads, 4, seed=seed + 6)
    args = (*queries, case.cache, *make_weights(heads, 8, 5, 12), spans, SCALE)
    expected = reference.mla_prefill(*args)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(absorbed, "KEYS", keys)
        assert_close(torch_ops.mla_prefill(*args), expected)
        patch.setattr(torch_ops, "_prefill_span", torch_ops._prefill_span_fused)
        assert_close(torch_ops.mla_prefill(*args), expected)


@pytest.mark.parametrize("length", [5, 63, 230, 1100])
@pytest.mark.parametrize("pieces", [[1], [2, 3], [4, 7, 8], [40]])
def test_tail_cut_anywhere_is_bit_identical(length: int, pieces: list[int]) -> None:
    """Prompts that are all tail, and that have pages below it; over more keys than are taken at a
    time. Cut behind the tail's begin, at it, and in front of it."""
    prompt, tail = make_prompt(length), length // PAGE * PAGE
    whole = run(prompt, 0, length, tail)
    for first in {0, max(0, tail - 70), max(0, tail - 1), tail}:
        cuts = sorted({c for cut in pieces for c in (first + cut, tail + cut) if c < length})
        edges = [first, *cuts, length]
        parts = [run(prompt, begin, end, tail) for begin, end in pairwise(edges)]
        assert torch.equal(torch.cat(parts), whole[first:])


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_nor_do_threads_see_how_it_was_cut(heads: int, threads: int) -> None:
    prompt, before = make_prompt(1100, heads, rank=96), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = run(prompt, 1088, 1100, 1088)
        parts = [run(prompt, at, min(at + 5, 1100), 1088) for at in range(1088, 1100, 5)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts), whole)


def test_rows_below_the_tail_are_as_without_one() -> None:
    prompt = make_prompt(230)
    plain = run(prompt, 0, 230, NO_TAIL)
    assert torch.equal(run(prompt, 0, 230, 256), plain)
    with_tail = run(prompt, 0, 230, 192)
    assert torch.equal(with_tail[:192], plain[:192])
    assert not torch.equal(with_tail[192:], plain[192:]), "the forms have their own bits"
    assert_close(with_tail, plain)
    whole_pages = make_prompt(192)
    assert torch.equal(run(whole_pages, 0, 192, 192), run(whole_pages, 0, 192, NO_TAIL))


def test_only_what_rows_below_the_tail_need_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    expanded: list[int] = []
    expand = torch_ops._expand_keys

    def noted(kv_LC: Tensor, w_k_HdR: Tensor) -> Tensor:
        expanded.append(len(kv_LC))
        return expand(kv_LC, w_k_HdR)

    monkeypatch.setattr(torch_ops, "_expand_keys", noted)
    prompt = make_prompt(230)
    run(prompt, 192, 230, 192)
    assert not expanded
    run(prompt, 100, 230, 192)
    assert expanded == [192]


def test_one_huge_score() -> None:
    q_nope, q_rope, case, weights = make_prompt(150)
    span = [MlaSpan(0, 22, 128, case.table[0], 128)]
    args = (1e4 * q_nope[128:], q_rope[128:], case.cache, *weights, span, SCALE)
    assert_close(torch_ops.mla_prefill(*args), reference.mla_prefill(*args))


def test_bf16() -> None:
    case = make_case([100], 3, 32, 8)
    w_k, w_v = (w.bfloat16() for w in make_weights(3, 16, 16, 32))
    queries = randn(60, 3, 16).bfloat16(), randn(60, 3, 8).bfloat16()
    spans = [MlaSpan(0, 60, 40, case.table[0], 64)]
    args = (*queries, case.cache.bfloat16(), w_k, w_v, spans, SCALE)
    got = torch_ops.mla_prefill(*args)
    assert got.dtype == torch.bfloat16
    assert_close(got, reference.mla_prefill(*args), 3e-2)
