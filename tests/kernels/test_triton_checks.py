import pytest
import torch

from tests.kernels.checks import randn
from tests.kernels.triton_checks import assert_bf16_close, assert_fence, fenced, spread

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_a_fence_holds_the_tensor_and_notices_a_write(dtype: torch.dtype) -> None:
    x = randn(3, 5).mul(9).to(dtype)
    inside = fenced(x)
    assert inside.is_contiguous() and inside.data_ptr() % 16 == 0
    assert torch.equal(inside.float(), x.float())
    assert_fence(inside)
    for place in (-1, 15):
        touched = fenced(x)
        at = touched.storage_offset() + place
        touched.as_strided((1,), (1,), at).view(torch.uint8).zero_()
        with pytest.raises(AssertionError, match="written outside"):
            assert_fence(touched)


@pytest.mark.parametrize(("axis", "stride"), [(0, (23, 5, 1)), (1, (32, 8, 1)), (2, (80, 20, 4))])
def test_spread_has_strides(axis: int, stride: tuple[int, ...]) -> None:
    x = randn(2, 4, 5)
    apart = spread(x, axis)
    assert apart.stride() == stride and torch.equal(apart, x)
    base = torch.empty(0).set_(apart.untyped_storage())
    assert (base == 1e30).sum() == base.numel() - x.numel()


def test_one_rounding_passes_and_two_do_not() -> None:
    exact = randn(1000).double()
    assert_bf16_close(exact.bfloat16(), exact)
    assert_bf16_close(exact.bfloat16()[:0], exact[:0])
    off = exact.bfloat16()
    off[7] = (exact[7] * (1 + 2**-7 + 2**-9)).bfloat16()
    with pytest.raises(AssertionError, match="at 7"):
        assert_bf16_close(off, exact)
    off[7] = float("nan")
    with pytest.raises(AssertionError, match="NaN"):
        assert_bf16_close(off, exact)
    with pytest.raises(AssertionError):
        assert_bf16_close(exact.float(), exact)
