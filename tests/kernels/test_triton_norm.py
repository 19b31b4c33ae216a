"""RMSNorm kernels against the equation, interpreted."""

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.launch import recording
from expertmesh.kernels.norm import reference, triton_ops
from tests.kernels.checks import assert_close, randn
from tests.kernels.triton_checks import assert_bf16_close, assert_fence, fenced, spread

EPS = 1e-5
SHAPES = [(1, 1), (3, 7), (5, 64), (33, 100), (2, 2500), (0, 12)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm(rows: int, width: int) -> None:
    x, weight = fenced(randn(rows, width) * 3), fenced(randn(width, seed=1))
    x[: rows // 2] *= 1e-4
    x[rows - 1 :] = 0.0
    assert_close(triton_ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert_fence(x)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm_bf16_rounds_before_the_weight(rows: int, width: int) -> None:
    x, weight = randn(rows, width).bfloat16(), randn(width, seed=1).bfloat16()
    got = triton_ops.rms_norm(fenced(x), fenced(weight), EPS)
    assert_bf16_close(got, reference.rms_norm(x.float(), weight.float(), EPS), roundings=2)
    expected = reference.rms_norm(x, weight, EPS)
    # The statistics differ in the last float32 bit, which may move a rounding by one step.
    assert rows == 0 or (got != expected).float().mean() < 0.01


def test_rms_norm_of_any_leading_shape() -> None:
    x, weight = randn(2, 3, 5, 24), randn(24, seed=1)
    assert_close(triton_ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rms_norm_reads_a_slice_of_a_wider_product_in_place(axis: int) -> None:
    x, weight = randn(9, 70), randn(70, seed=1)
    expected = reference.rms_norm(x, weight, EPS)
    assert_close(triton_ops.rms_norm(spread(x, axis), weight, EPS), expected)
    with recording() as launches:
        triton_ops.rms_norm(view := spread(x), weight, EPS)
    assert launches[0].arguments[0] is view


def gated(tokens: int, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    x, gate = randn(tokens, heads, width), randn(tokens, heads, width, seed=2) * 5
    return x, randn(width, seed=1), gate


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 24), (7, 3, 100), (1, 2, 2100), (0, 2, 8)])
def test_gated_rms_norm(shape: tuple[int, int, int]) -> None:
    x, weight, gate = gated(*shape)
    expected = reference.gated_rms_norm(x, weight, gate, EPS)
    got = triton_ops.gated_rms_norm(fenced(x), fenced(weight), fenced(gate), EPS)
    assert_close(got, expected)
    x, gate = x.bfloat16(), gate.bfloat16()
    exact = reference.gated_rms_norm(x.float(), weight, gate.float(), EPS)
    assert_bf16_close(triton_ops.gated_rms_norm(fenced(x), weight, fenced(gate), EPS), exact)


@pytest.mark.filterwarnings("ignore:overflow")
def test_gated_rms_norm_takes_the_gates_dtype_and_saturates() -> None:
    x, weight, gate = gated(4, 2, 24)
    gate[0], gate[1] = 200.0, -200.0
    got = triton_ops.gated_rms_norm(x, weight, gate.bfloat16(), EPS)
    assert_bf16_close(got, reference.gated_rms_norm(x, weight, gate.bfloat16().float(), EPS))
    assert not got[1].any()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_gated_rms_norm_reads_slices_in_place(axis: int) -> None:
    x, weight, gate = gated(5, 3, 24)
    expected = reference.gated_rms_norm(x, weight, gate, EPS)
    got = triton_ops.gated_rms_norm(spread(x, axis), weight, spread(gate, axis), EPS)
    assert_close(got, expected)


def test_a_gate_of_one_wide_projection_is_not_copied() -> None:
    x, weight, gate = gated(5, 3, 24)
    wide = spread(gate.view(5, 72)).view(5, 3, 24)
    with recording() as launches:
        triton_ops.gated_rms_norm(x, weight, wide, EPS)
    assert launches[0].arguments[2] is wide


def test_rows_do_not_depend_on_companions() -> None:
    """Each row of a tile of several, wherever it stands in it."""
    x, weight, gate = gated(9, 3, 100)
    normed = triton_ops.rms_norm(x[:, 0], weight, EPS)
    product = triton_ops.gated_rms_norm(x, weight, gate, EPS)
    for rows in ([4], [8, 0], [7, 2, 5, 1, 0, 8, 3, 6, 4]):
        assert torch.equal(triton_ops.rms_norm(x[rows, 0], weight, EPS), normed[rows])
        got = triton_ops.gated_rms_norm(x[rows], weight, gate[rows], EPS)
        assert torch.equal(got, product[rows])
