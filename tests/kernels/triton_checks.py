"""Helpers of the tests that run Triton kernels in the interpreter."""

import torch
from torch import Tensor

# Stands where a kernel must not read: survives any sum, and a maximum does not drop it as a NaN.
HUGE = 1e30
_MARGIN = 64  # elements: keeps the address a multiple of 16 bytes, as torch's allocator gives


def fenced(tensor: Tensor, filler: float = HUGE) -> Tensor:
    """The same numbers, dense, inside a larger buffer with `filler` before and behind.

    Integers have the largest of their type there (a slot or row number far outside); types that do
    not reach `filler` have NaN. A kernel that reads beside the tensor shows it in its result;
    whether it wrote there, `assert_fence` tells.
    """
    size = tensor.numel()
    buffer = _filled(size + 2 * _MARGIN, tensor.dtype, filler)
    inside = buffer[_MARGIN : _MARGIN + size].view(tensor.shape)
    return inside.copy_(tensor)


def assert_fence(inside: Tensor, filler: float = HUGE) -> None:
    """Nothing was written around a tensor that `fenced` made."""
    buffer = inside.as_strided((inside.untyped_storage().nbytes() // inside.itemsize,), (1,), 0)
    expected = _filled(_MARGIN, inside.dtype, filler)
    for side in (buffer[:_MARGIN], buffer[_MARGIN + inside.numel() :]):
        assert torch.equal(_bits(side), _bits(expected)), "written outside"


def spread(tensor: Tensor, axis: int = 0, gap: int = 3, filler: float = HUGE) -> Tensor:
    """The same numbers as a strided view: `gap` elements of `filler` behind every slice of `axis`.

    What a slice of a wider tensor looks like (`projected[:, :width]`). The other axes stay as they
    were inside a slice; the axes before `axis` hold the widened ones. With axis -1 the elements
    themselves lie apart.
    """
    axis %= tensor.dim()
    outer, inner = tensor.shape[: axis + 1], tensor.shape[axis + 1 :]
    width = 1
    for size in inner:
        width *= size
    buffer = _filled(tensor.numel() + gap * outer.numel(), tensor.dtype, filler)
    wide = buffer.view(*outer, width + gap)
    inside = wide[..., :width].unflatten(-1, inner) if inner else wide[..., 0]
    return inside.copy_(tensor)


def assert_bf16_close(actual: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """actual is bfloat16, of exact's shape, without NaN, and off by one final rounding at most.

    exact: float32 or float64, of the same bfloat16 inputs. roundings: how many half steps of
    bfloat16 (2^-8 of the value) are allowed: one where the kernel rounds once; more only where the
    operator's definition rounds in between. Values near zero get what float32 sums of numbers as
    large as the tensor's largest may be off by.
    """
    assert actual.dtype == torch.bfloat16 and actual.shape == exact.shape
    got, wanted = actual.double(), exact.double()
    assert not got.isnan().any(), "NaN"
    if not got.numel():
        return
    size = wanted.abs()
    allowed = roundings * 2.0**-8 * size + 1e-6 * size.max().clamp(min=1e-3)
    over = (got - wanted).abs() - allowed
    worst = int(over.argmax())
    told = f"{got.flatten()[worst]:.6g} for {wanted.flatten()[worst]:.6g} at {worst}"
    assert float(over.max()) <= 0, told


def _filled(size: int, dtype: torch.dtype, filler: float) -> Tensor:
    if dtype == torch.bool:
        return torch.ones(size, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.full((size,), torch.iinfo(dtype).max, dtype=dtype)
    fits = abs(filler) <= torch.finfo(dtype).max
    return torch.full((size,), filler if fits else float("nan")).to(dtype)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
