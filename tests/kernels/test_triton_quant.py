"""MXFP4 and FP8 kernels against the torch twins, bit for bit, interpreted."""

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.quant import reference, torch_ops, triton_ops
from tests.kernels.checks import randn
from tests.kernels.triton_checks import assert_fence, fenced, spread

BYTES = torch.arange(256, dtype=torch.uint8)


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """NaN equals NaN whatever its payload."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    both = actual.isnan() & expected.isnan()
    integers = {4: torch.int32, 2: torch.int16}[actual.element_size()]
    return bool((both | (actual.view(integers) == expected.view(integers))).all())


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_of_every_code_under_every_scale(dtype: torch.dtype) -> None:
    """Each code in both halves of a byte."""
    packed = (torch.arange(16) + 16 * torch.arange(15, -1, -1)).to(torch.uint8).repeat(16, 16)
    scale = BYTES.view(16, 16)
    got = triton_ops.mxfp4_decode(fenced(packed), fenced(scale), dtype)
    assert same_bits(got, torch_ops.mxfp4_decode(packed, scale, dtype))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 3, 7), (0, 2), (33, 4)])
def test_mxfp4_of_odd_sizes(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    lead, blocks = shape[:-1], shape[-1]
    packed = torch.randint(256, (*lead, 16 * blocks), dtype=torch.uint8, generator=generator)
    scale = torch.randint(255, (*lead, blocks), dtype=torch.uint8, generator=generator)
    got = triton_ops.mxfp4_decode(fenced(packed), fenced(scale))
    assert same_bits(got, reference.mxfp4_decode(packed, scale).view(got.shape))


def test_mxfp4_of_strided_experts() -> None:
    packed, scale = BYTES.view(2, 8, 16), torch.full((2, 8, 1), 120, dtype=torch.uint8)
    whole = triton_ops.mxfp4_decode(packed, scale)
    assert torch.equal(whole[:, ::2], triton_ops.mxfp4_decode(packed[:, ::2], scale[:, ::2]))


def rows_of(width: int) -> Tensor:
    """Ordinary rows, and all that is special about a scale."""
    x = randn(10, width)
    x[1] *= 1e30
    x[2] *= 1e-30
    x[3] = 0.0
    x[4] *= 1e-42  # the quotient's divisor would be subnormal
    x[5] = -0.0
    x[6] = 3e38  # near the largest
    x[7, width // 2] = float("nan")
    x[8, width // 3] = float("-inf")
    return x


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("width", [1, 3, 64, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_is_the_twin(width: int, dtype: torch.dtype) -> None:
    x = fenced(rows_of(width).to(dtype))
    codes, scale = triton_ops.fp8_encode(x)
    wanted, wanted_scale = torch_ops.fp8_encode(x)
    assert same_bits(scale, wanted_scale)
    numbers = codes.view(torch.float8_e4m3fn).float()
    assert same_bits(numbers, wanted.view(torch.float8_e4m3fn).float())
    got = triton_ops.fp8_decode(fenced(codes), fenced(scale), dtype)
    assert same_bits(got, torch_ops.fp8_decode(wanted, wanted_scale, dtype))
    assert got.isfinite().all(1).tolist() == [row not in (7, 8) for row in range(10)]
    assert_fence(x)


def test_fp8_rounds_to_the_nearest_even_code() -> None:
    values = BYTES.view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()].sort().values
    middles = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(float(side))) for side in ("-inf", "inf")]
    # A row whose largest value is 448 has scale 1: codes are of the numbers themselves.
    row = torch.cat([values, middles, *beside]).unsqueeze(0)
    codes, scale = triton_ops.fp8_encode(row)
    assert scale.item() == 1.0
    assert torch.equal(codes, row.to(torch.float8_e4m3fn).view(torch.uint8))


def test_fp8_decodes_every_code() -> None:
    codes, scale = BYTES.view(2, 128), torch.tensor([[0.37], [1e-40]])
    for dtype in (torch.float32, torch.bfloat16):
        got = triton_ops.fp8_decode(codes, scale, dtype)
        assert same_bits(got, torch_ops.fp8_decode(codes, scale, dtype))


def test_fp8_of_rows_that_lie_apart_and_of_none() -> None:
    x = randn(5, 24)
    codes, scale = triton_ops.fp8_encode(x)
    assert torch.equal(triton_ops.fp8_encode(spread(x))[0], codes)
    assert torch.equal(triton_ops.fp8_encode(spread(x, -1))[0], codes)
    decoded = triton_ops.fp8_decode(codes, scale, torch.float32)
    assert torch.equal(triton_ops.fp8_decode(spread(codes), scale, torch.float32), decoded)
    nothing = triton_ops.fp8_encode(x[:0])
    assert [part.shape for part in nothing] == [(0, 24), (0, 1)]
    assert triton_ops.fp8_decode(*nothing, torch.bfloat16).shape == (0, 24)
