"""Makes Triton's interpreter compute in bfloat16 and float8.

The interpreter holds such blocks as unsigned integers. Loads, stores and selections are right, but
sums, products, comparisons, dots and reductions work on the bit patterns as if they were numbers,
and casts truncate (to float8 they lose the carry as well). With `install`, whatever computes sees
float32, and a result of a narrow type is rounded to nearest even, once per operation. A GPU rounds
the same way, with one exception: it may round each step of a reduction in a narrow type. Kernels
reduce in float32.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

# Type -> (torch's type, integers of its width in torch, in numpy)
_NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.int16, np.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.int8, np.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.int8, np.uint8),
}

# What the fix touches, beside the casts: these compute with the numbers that their operands hold
# (functions as exp take no narrow type) ...
COMPUTING = ("binary_op", "ternary_op", "create_fma", "create_dot")
# ... and these reduce or scan them.
FOLDING = ((ReduceOps, "sum"), (ReduceOps, "min_max"), (ScanOps, "cumsum"), (ScanOps, "cumprod"))


def decode(data: Any, dtype: Any) -> Any:
    """float32 numbers behind the bits of a narrow type."""
    narrow, torch_bits, _ = _NARROW[dtype]
    signed = np.array(data).view(np.dtype(f"i{data.itemsize}"))
    return torch.from_numpy(signed).view(torch_bits).view(narrow).float().numpy()


def encode(numbers: Any, dtype: Any) -> Any:
    """Bits of a narrow type, rounded to nearest even; too large for float8 becomes its largest, as
    the conversions of GPUs do."""
    narrow, torch_bits, numpy_bits = _NARROW[dtype]
    wide = torch.from_numpy(np.array(numbers, dtype=np.float32))
    if dtype != tl.bfloat16:
        limit = torch.finfo(narrow).max
        wide = wide.clamp(-limit, limit)
    return wide.to(narrow).view(torch_bits).numpy().view(numpy_bits)


def install() -> None:
    """Once for the process; later calls do nothing."""
    builder = InterpreterBuilder
    if hasattr(builder, "get_bf16"):
        return
    builder.get_bf16 = lambda self, value: _narrowed(np.array([value], np.float32), tl.bfloat16)
    for name in COMPUTING:
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.cast_impl = _cast(builder.cast_impl)
    builder.create_fp_to_fp = _convert(builder.create_fp_to_fp)
    for operations, name in FOLDING:
        setattr(operations, name, _folded_in_float32(getattr(operations, name)))


def _is_narrow(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar in _NARROW


def _widened(handle: Any) -> Any:
    if not _is_narrow(handle):
        return handle
    return TensorHandle(decode(handle.data, handle.dtype.scalar), tl.float32)


def _narrowed(numbers: Any, dtype: Any) -> Any:
    return TensorHandle(encode(numbers, dtype), dtype)


def _in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def compute(self: Any, *operands: Any) -> Any:
        # Selecting moves bits; its condition has another type than its result.
        if operands[-1] is np.where or not any(map(_is_narrow, operands)):
            return method(self, *operands)
        result = method(self, *map(_widened, operands))
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        # Of the last tensor, as the interpreter has it: an accumulator decides for a dot.
        handles = [one for one in operands if isinstance(one, TensorHandle)]
        return (
            _narrowed(result.data, handles[-1].dtype.scalar) if _is_narrow(handles[-1]) else result
        )

    return compute


def _cast(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def cast(self: Any, source: Any, target: Any) -> Any:
        if target.scalar in _NARROW:
            if source.dtype.scalar == target.scalar:
                return source
            return _narrowed(_widened(source).data, target.scalar)
        return method(self, _widened(source), target)

    return cast


def _convert(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def convert(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding == ir.ROUNDING_MODE.RTZ:
            return method(self, source, target, rounding)
        return interpreter.InterpreterBuilder.cast_impl(self, source, target)

    return convert


def _folded_in_float32(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def fold(self: Any, given: Any, *how: Any, **more: Any) -> Any:
        block = given[0] if isinstance(given, tuple) else given
        narrow = block.handle.dtype.scalar
        if narrow not in _NARROW:
            return method(self, given, *how, **more)
        wide_type = tl.block_type(tl.float32, list(block.shape))
        results = method(self, tl.core.tensor(_widened(block.handle), wide_type), *how, **more)
        if isinstance(results, (list, tuple)):
            return type(results)(_as_narrow(self, one, narrow) for one in results)
        return _as_narrow(self, results, narrow)

    return fold


def _as_narrow(folding: Any, result: Any, dtype: Any) -> Any:
    """Positions (of argmin) stay integers."""
    if result.dtype != tl.float32:
        return result
    bits = encode(result.handle.data, dtype)
    return folding.to_tensor(bits if result.type.is_block() else bits[0], dtype)
