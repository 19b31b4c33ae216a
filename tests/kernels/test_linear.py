"""Packed linear: the stored product, and rows that do not depend on their companions."""

import pytest
import torch

from expertmesh.kernels.linear import reference, torch_ops
from expertmesh.kernels.linear.torch_ops import PREPACK_ELEMENTS

SHAPES = [(7, 32), (96, 64), (331, 64), (1024, 256), (513, 520)]  # N, K; the last two prepacked


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_matches_reference(width: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(width, depth, generator=generator) * depth**-0.5
    x = torch.randn(9, depth, generator=generator)
    fast, slow = torch_ops.pack_linear(weight), reference.pack_linear(weight)
    torch.testing.assert_close(fast(x), slow(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(width: int, depth: int) -> None:
    assert 513 * 520 >= PREPACK_ELEMENTS > 331 * 64
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(width, depth, generator=generator)
    x = torch.randn(200, depth, generator=generator)
    apply = torch_ops.pack_linear(weight)
    whole = apply(x)
    for begin, rows in [(0, 4), (0, 5), (3, 8), (100, 33), (50, 64), (7, 130), (196, 4)]:
        assert torch.equal(apply(x[begin : begin + rows]), whole[begin : begin + rows])
    # A slice of a wider projection is not contiguous.
    wide = torch.randn(40, depth + 32, generator=generator)
    assert torch.equal(apply(wide[:, :depth]), apply(wide[:, :depth].contiguous()))
