"""The base is an estimate with a true bound, the same on every device; the refinement is exact."""

import numpy as np
import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.codec import quantized
from expertmesh.actors.state.codec.rotation import (
    blocks,
    hadamard,
    hadamard_on,
    norms,
    rotate,
    unrotate,
)

WIDTHS = (1, 7, 8, 40, 64, 100, 128, 576)
CPU = torch.device("cpu")


def rows(width: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> Tensor:
    return torch.randn(64, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def opened(blob: bytes, x: Tensor, bits: int) -> quantized.Base:
    return quantized.open_base(memoryview(blob), *x.shape, bits)


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_keeps_lengths_and_has_an_inverse(width: int) -> None:
    x = rows(width).numpy()
    turned = rotate(x)
    np.testing.assert_allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    np.testing.assert_allclose(unrotate(turned), x, atol=1e-5)
    assert sum(blocks(width)) == width == norms(width).size


def test_rotation_spreads_a_channel_that_sticks_out() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 17] = 1.0
    np.testing.assert_allclose(np.abs(rotate(x)), 128**-0.5, rtol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_sums_of_codes_are_exact_in_any_order(width: int) -> None:
    codes = np.random.default_rng(1).integers(-128, 128, (64, width)).astype(np.float32)
    exact = hadamard(codes.astype(np.float64).astype(np.float32)).astype(np.int64)
    assert np.array_equal(exact, hadamard_on(torch.from_numpy(codes)).numpy().astype(np.int64))
    assert np.array_equal(exact, hadamard(codes[::-1])[::-1].astype(np.int64))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_device_decodes_to_the_same_bits(width: int, bits: int) -> None:
    x = rows(width)
    base = opened(quantized.encode(x, bits)[0], x, bits)
    here = quantized.decode(base, CPU)
    assert torch.equal(here, quantized.decode_on(base, CPU))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_errors_are_bounded_by_what_is_stored(bits: int, dtype: torch.dtype, scale: float) -> None:
    x = (rows(128) * scale).to(dtype)
    x[3], x[4] = 0.0, x[4] * torch.linspace(-8, 8, 128).exp2().to(dtype)
    base = opened(quantized.encode(x, bits)[0], x, bits)
    wrong = (quantized.decode(base, CPU).double() - x.double()).norm(dim=1)
    assert (wrong <= base.errors.double()).all()
    assert (base.errors.double() <= 1.01 * wrong + 1e-30).all()  # and no looser than bf16 makes it


@pytest.mark.parametrize("bits", [8, 4])
def test_nothing_is_clipped(bits: int) -> None:
    """No value of the rotated row is further from its code than half a step."""
    x = rows(128)
    base = opened(quantized.encode(x, bits)[0], x, bits)
    steps = 2 * np.sqrt(np.float32(128)) * base.scales.float().numpy()
    wrong = np.abs(rotate(x.numpy()) - (base.codes.numpy() + 0.5) * steps)
    assert (wrong <= steps * 0.50001).all()


def test_rows_that_no_float_can_bound_say_so() -> None:
    x = rows(16)
    x[0, 0], x[1, 1], x[2, 2] = torch.nan, torch.inf, 3e38
    base, refinement = quantized.encode(x, 8)
    read = opened(base, x, 8)
    assert torch.isinf(read.errors[:3]).all() and torch.isfinite(read.errors[3:]).all()
    out = torch.full_like(x, 7.0)
    quantized.refine(quantized.decode(read, CPU), memoryview(refinement), out)
    assert torch.equal(out.view(torch.int32), x.view(torch.int32))


@pytest.mark.parametrize(("bits", "most"), [(8, 1.03), (4, 1.03)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_base_and_refinement_stay_near_the_raw_size(
    bits: int, most: float, dtype: torch.dtype
) -> None:
    x = rows(128, dtype)
    base, refinement = quantized.encode(x, bits)
    assert len(base) + len(refinement) <= most * x.nbytes


def test_a_base_of_another_size_is_refused() -> None:
    x = rows(40)
    base, _ = quantized.encode(x, 4)
    for blob, width in ((base[:-1], 40), (base + b"x", 40), (base, 41), (base, 48), (b"", 40)):
        with pytest.raises(ValueError, match="a base of"):
            quantized.open_base(memoryview(blob), 64, width, 4)
