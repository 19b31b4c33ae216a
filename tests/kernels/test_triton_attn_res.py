"""Attention Residuals' kernel against the equation, interpreted."""

import pytest
import torch

from expertmesh.kernels.attn_res import reference, triton_ops
from expertmesh.kernels.launch import recording
from tests.kernels.checks import assert_close, randn
from tests.kernels.triton_checks import assert_bf16_close, assert_fence, fenced, spread

# (sources, tokens, width): every count that K3 has and more, odd widths, wide enough for one group
# per source, no tokens.
SHAPES = [(n, 2, 40) for n in range(1, 12)] + [(3, 1, 1), (4, 3, 129), (3, 1, 4100), (2, 0, 16)]


def drawn(
    shape: tuple[int, int, int], sharp: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count, _, width = shape
    sources = randn(*shape) * 3
    sources[count // 2] = 0.0  # a zero source still takes part, with score 0
    # A score adds `width` products: keep its own rounding out of the comparison.
    return sources, randn(width, seed=1) * sharp / width, 1 + randn(width, seed=2) / 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sharp", [1.0, 30.0])
def test_mix_and_norm_in_one(shape: tuple[int, int, int], sharp: float) -> None:
    sources, score, norm = drawn(shape, sharp)
    # An epsilon of the mix's own size: a mix near zero would only show rounding.
    expected = reference.attn_res_mix_norm(sources, score, norm, norm_eps=1e-2)
    inside = fenced(sources)
    got = triton_ops.attn_res_mix_norm(inside, fenced(score), fenced(norm), norm_eps=1e-2)
    assert_close(got, expected)
    assert_fence(inside)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mix(shape: tuple[int, int, int]) -> None:
    sources, score, _ = drawn(shape)
    got = triton_ops.attn_res_mix(fenced(sources), fenced(score))
    assert_close(got, reference.attn_res_mix(sources, score))


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_bf16_rounds_once(count: int) -> None:
    sources, score, norm = drawn((count, 3, 100))
    sources, norm = sources.bfloat16(), norm.bfloat16()
    exact = reference.attn_res_mix(sources.float(), score)
    assert_bf16_close(triton_ops.attn_res_mix(fenced(sources), score), exact)
    exact = reference.attn_res_mix_norm(sources.float(), score, norm.float())
    assert_bf16_close(triton_ops.attn_res_mix_norm(fenced(sources), score, norm), exact)


def test_a_single_source_passes_without_a_launch() -> None:
    sources, score, _ = drawn((1, 5, 32))
    with recording() as launches:
        assert triton_ops.attn_res_mix(sources, score) is not None
    assert not launches
    assert triton_ops.attn_res_mix(sources, score).data_ptr() == sources.data_ptr()


def test_one_launch_reads_only_the_running_prefix_of_a_buffer() -> None:
    sources, score, norm = drawn((6, 4, 32))
    expected = reference.attn_res_mix_norm(sources[:3].clone(), score, norm)
    sources[3:] = float("nan")
    with recording() as launches:
        triton_ops.attn_res_mix_norm(sources[:3], score, norm)
    assert [one.grid for one in launches] == [(4,)]
    assert_close(triton_ops.attn_res_mix_norm(sources[:3], score, norm), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sources_that_lie_apart(axis: int) -> None:
    sources, score, norm = drawn((5, 3, 20))
    expected = reference.attn_res_mix_norm(sources, score, norm)
    got = triton_ops.attn_res_mix_norm(spread(sources, axis), score, norm)
    assert_close(got, expected)


def test_far_scores_and_broken_sources() -> None:
    """The running mix is rescaled when a later source scores higher, by any distance."""
    sources, score = torch.ones(4, 2, 16), torch.full((16,), 50.0)
    sources[1], sources[2, 0], sources[3] = -1.0, 3.0, -2.0
    expected = reference.attn_res_mix(sources, score)
    assert_close(triton_ops.attn_res_mix(sources, score), expected)
    assert_close(triton_ops.attn_res_mix(sources.flip(0), score), expected)
    sources[2, 1, 3] = float("nan")
    got = triton_ops.attn_res_mix(sources, score)
    assert got[1].isnan().all() and not got[0].isnan().any()


def test_tokens_do_not_depend_on_companions() -> None:
    sources, score, norm = drawn((5, 7, 36))
    whole = triton_ops.attn_res_mix_norm(sources, score, norm)
    for rows in ([4], [6, 0, 3]):
        got = triton_ops.attn_res_mix_norm(sources[:, rows], score, norm)
        assert torch.equal(got, whole[rows])
