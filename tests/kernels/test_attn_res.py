import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.kernels.attn_res import reference, torch_ops
from expertmesh.kernels.norm.torch_ops import rms_norm
from tests.kernels.checks import assert_close, assert_rows_alone, randn


@given(
    count=st.integers(1, 9),
    tokens=st.integers(0, 7),
    width=st.integers(1, 70),
    sharp=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_mix(count: int, tokens: int, width: int, sharp: float, seed: int) -> None:
    sources = randn(count, tokens, width, seed=seed) * 3
    sources[count // 2] = 0.0  # a zero source still takes part, with score 0
    # A score adds `width` products: keep its own rounding out of the comparison.
    weight = randn(width, seed=seed + 1) * sharp / width
    kept = sources.clone()
    expected = reference.attn_res_mix(sources, weight)
    assert_close(torch_ops.attn_res_mix(sources, weight), expected)
    assert torch.equal(sources, kept)


def test_a_single_source_passes_unchanged() -> None:
    sources = randn(1, 5, 32).bfloat16()
    assert torch.equal(torch_ops.attn_res_mix(sources, randn(32)), sources[0])


def test_bf16_sources() -> None:
    sources, weight = randn(4, 20, 64).bfloat16(), randn(64, seed=1) / 8
    got = torch_ops.attn_res_mix(sources, weight)
    assert_close(got, reference.attn_res_mix(sources, weight), 2**-7)


def test_only_the_running_prefix_of_a_buffer_is_read() -> None:
    buffer = randn(6, 4, 32)
    expected = torch_ops.attn_res_mix(buffer[:3].clone(), randn(32))
    buffer[3:] = float("nan")
    assert torch.equal(torch_ops.attn_res_mix(buffer[:3], randn(32)), expected)


@pytest.mark.parametrize("count", [2, 3, 5, 9])
@pytest.mark.parametrize("width", [12, 32, 64, 256])
def test_tokens_do_not_depend_on_companions(count: int, width: int) -> None:
    sources, weight = randn(count, 40, width), randn(width, seed=1)
    norm = randn(width, seed=2)

    def fused(rows: torch.Tensor) -> torch.Tensor:
        return torch_ops.attn_res_mix_norm(sources[:, rows].contiguous(), weight, norm)

    assert_rows_alone(lambda rows: torch_ops.attn_res_mix(sources[:, rows].contiguous(), weight))
    assert_rows_alone(fused)


@given(
    count=st.integers(1, 9),
    tokens=st.integers(0, 7),
    width=st.integers(1, 70),
    sharp=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_mix_and_norm_in_one(count: int, tokens: int, width: int, sharp: float, seed: int) -> None:
    sources = randn(count, tokens, width, seed=seed) * 3
    sources[count // 2] = 0.0
    weight, norm = randn(width, seed=seed + 1) * sharp / width, randn(width, seed=seed + 2)
    kept = sources.clone()
    # An epsilon of the mix's own size: a mix near zero would only show rounding.
    expected = reference.attn_res_mix_norm(sources, weight, norm, norm_eps=1e-2)
    assert_close(torch_ops.attn_res_mix_norm(sources, weight, norm, norm_eps=1e-2), expected, 1e-4)
    unfused = rms_norm(torch_ops.attn_res_mix(sources, weight), norm, 1e-2)
    assert_close(torch_ops.attn_res_mix_norm(sources, weight, norm, norm_eps=1e-2), unfused, 1e-4)
    assert torch.equal(sources, kept)


def test_mix_and_norm_of_bf16_and_of_a_buffers_prefix() -> None:
    buffer, weight, norm = randn(6, 20, 64).bfloat16(), randn(64, seed=1) / 8, randn(64, seed=2)
    buffer[4:] = float("nan")
    got = torch_ops.attn_res_mix_norm(buffer[:4], weight, norm)
    assert_close(got, reference.attn_res_mix_norm(buffer[:4], weight, norm), 2**-7)
