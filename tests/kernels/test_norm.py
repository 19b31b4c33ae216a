import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.kernels.norm import reference, torch_ops
from tests.kernels.checks import assert_close, assert_rows_alone, randn

EPS = 1e-5


@given(rows=st.integers(0, 9), width=st.integers(1, 70), seed=st.integers(0, 99))
def test_rms_norm(rows: int, width: int, seed: int) -> None:
    x, weight = randn(rows, width, seed=seed) * 3, randn(width, seed=seed + 1)
    x[: rows // 2] *= 1e-4
    x[rows - 1 :] = 0.0
    expected = reference.rms_norm(x, weight, EPS)
    assert_close(torch_ops.rms_norm(x, weight, EPS), expected)


@pytest.mark.parametrize("seed", range(5))
def test_rms_norm_bf16_rounds_before_the_weight(seed: int) -> None:
    x, weight = randn(40, 64, seed=seed).bfloat16(), randn(64, seed=seed + 1).bfloat16()
    got, expected = torch_ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS)
    # The statistics differ in the last float32 bit, which may move a bf16 rounding by one step.
    assert (got != expected).float().mean() < 0.01
    assert_close(got, expected, 2**-6)


@given(
    rows=st.integers(0, 5), heads=st.integers(1, 4), dim=st.integers(1, 40), seed=st.integers(0, 99)
)
def test_gated_rms_norm(rows: int, heads: int, dim: int, seed: int) -> None:
    x, weight = randn(rows, heads, dim, seed=seed), randn(dim, seed=seed + 1)
    gate = randn(rows, heads * 2, dim, seed=seed + 2)[:, :heads] * 5  # rows with a stride
    expected = reference.gated_rms_norm(x, weight, gate, EPS)
    assert_close(torch_ops.gated_rms_norm(x, weight, gate, EPS), expected)


def test_inputs_are_left_alone() -> None:
    x, weight, gate = randn(4, 2, 32), randn(32), randn(4, 2, 32, seed=2)
    kept = x.clone(), weight.clone(), gate.clone()
    torch_ops.rms_norm(x, weight, EPS)
    torch_ops.gated_rms_norm(x, weight, gate, EPS)
    x16 = x.bfloat16()
    torch_ops.rms_norm(x16, weight.bfloat16(), EPS)
    assert all(torch.equal(a, b) for a, b in zip(kept, (x, weight, gate), strict=True))
    assert torch.equal(x16, x.bfloat16())


@pytest.mark.parametrize("width", [12, 32, 64, 100, 256])
def test_rows_do_not_depend_on_companions(width: int) -> None:
    x, weight = randn(40, 3, width), randn(width, seed=1)
    gate = randn(40, 3, width, seed=2)
    assert_rows_alone(lambda rows: torch_ops.rms_norm(x[rows], weight, EPS))
    assert_rows_alone(lambda rows: torch_ops.gated_rms_norm(x[rows], weight, gate[rows], EPS))
