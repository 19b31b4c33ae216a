"""The interpreter computes in bfloat16 and float8 as a GPU does (tests/support/triton_bf16.py).

These tests are what every bf16 test of a kernel stands on; a new Triton may break them.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

from tests.support import triton_bf16

# The interpreter's operations (without "create_") that never see the numbers of a narrow type ...
MOVES = """
    load store masked_load masked_store tensor_pointer_load tensor_pointer_store reshape trans
    expand_dims broadcast cat join split splat unsplat gather bitcast select make_range advance
    make_block_ptr make_tensor_descriptor descriptor_load descriptor_store descriptor_gather
    descriptor_scatter int_to_ptr ptr_to_int addptr fabs print assert assume barrier
"""
INTEGERS = """
    add sub mul idiv sdiv udiv srem urem shl lshr ashr and or xor minsi minui maxsi maxui icmpSLE
    icmpSLT icmpSGE icmpSGT icmpULE icmpULT icmpUGE icmpUGT icmpEQ icmpNE umulhi iabs histogram
    get_program_id get_num_programs
"""
REFUSES_NARROW_TYPES = """
    cos exp exp2 log log2 precise_sqrt sqrt sin floor ceil rsqrt erf precise_divf atomic_cas
    atomic_rmw extern_elementwise inline_asm
"""
# ... and those that do, all by way of what the fix replaces.
CASTS = "si_to_fp ui_to_fp fp_to_si fp_to_ui fp_ext fp_trunc int_cast fp_to_fp"
COMPUTES = """
    fadd fmul fdiv frem fsub minimumf minnumf maximumf maxnumf clampf fma dot fcmpOLT fcmpOGT
    fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE
"""


def test_every_operation_of_the_interpreter_is_accounted_for() -> None:
    there = {name for name in dir(InterpreterBuilder) if name.startswith("create_")}
    known = " ".join([MOVES, INTEGERS, REFUSES_NARROW_TYPES, CASTS, COMPUTES]).split()
    assert there == {f"create_{name}" for name in known}
    triton_bf16.install()  # once more changes nothing
    for name in triton_bf16.COMPUTING:
        method = getattr(InterpreterBuilder, name)
        assert not hasattr(method.__wrapped__, "__wrapped__")


def numbers(seed: int, positive: bool = False) -> Tensor:
    """64 of different sizes in bfloat16, among them equal ones, halves, zero."""
    drawn = torch.randn(64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    drawn[3:9] = torch.tensor([0.0, 0.5, -2.5, 3.0, 100.0, 1e-3])
    return drawn.abs() + 2**-7 if positive else drawn


@triton.jit
def two_operands_kernel(x, y, out, OPERATION: tl.constexpr):
    at = tl.arange(0, 64)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.static_assert(a.dtype == tl.bfloat16)
    if OPERATION == "add":
        c = a + b
    elif OPERATION == "subtract":
        c = a - b
    elif OPERATION == "multiply":
        c = a * b
    elif OPERATION == "negate":
        c = -a
    elif OPERATION == "divide":
        c = a / b
    elif OPERATION == "scale":
        c = a * 2.5
    elif OPERATION == "maximum":
        c = tl.maximum(a, b)
    elif OPERATION == "minimum":
        c = tl.minimum(a, b)
    elif OPERATION == "abs":
        c = tl.abs(a)
    elif OPERATION == "clamp":
        c = tl.clamp(a, -1.0, 0.5)
    elif OPERATION == "fma":
        c = tl.fma(a, b, a)
    elif OPERATION == "where":
        c = tl.where(a > b, a, b * b)
    elif OPERATION == "less":
        c = (a < b).to(tl.bfloat16)
    elif OPERATION == "equal":
        c = (a == 3.0).to(tl.bfloat16)
    elif OPERATION == "floor":
        c = tl.floor(a.to(tl.float32)).to(tl.bfloat16)
    elif OPERATION == "to_int":
        c = (a * 4.0).to(tl.int32).to(tl.bfloat16)
    elif OPERATION == "full":
        c = a + tl.full((64,), 0.3, tl.bfloat16)
    else:
        c = tl.cumsum(a, 0)
    tl.store(out + at, c)


TWO_OPERANDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "negate": lambda a, b: -a,
    "divide": lambda a, b: a / b,
    "scale": lambda a, b: a * 2.5,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "abs": lambda a, b: a.abs(),
    "clamp": lambda a, b: a.clamp(-1.0, 0.5),
    "fma": lambda a, b: (a.float() * b.float() + a.float()).bfloat16(),
    "where": lambda a, b: torch.where(a > b, a, b * b),
    "less": lambda a, b: (a < b).bfloat16(),
    "equal": lambda a, b: (a == 3.0).bfloat16(),
    "floor": lambda a, b: a.floor(),
    "to_int": lambda a, b: (a * 4.0).int().bfloat16(),
    "full": lambda a, b: a + torch.tensor(0.3).bfloat16(),
    "cumsum": lambda a, b: a.float().cumsum(0).bfloat16(),
}


@pytest.mark.parametrize("operation", TWO_OPERANDS)
def test_elementwise_operations_round_once(operation: str) -> None:
    x, y = numbers(0), numbers(1, positive=True)
    out = torch.empty(64, dtype=torch.bfloat16)
    two_operands_kernel[(1,)](x, y, out, OPERATION=operation)
    assert torch.equal(out, TWO_OPERANDS[operation](x, y))


@triton.jit
def function_kernel(x, out, FUNCTION: tl.constexpr):
    at = tl.arange(0, 64)
    # They take float32 alone.
    b = tl.load(x + at).to(tl.float32)
    if FUNCTION == "exp":
        c = tl.exp(b)
    elif FUNCTION == "log2":
        c = tl.log2(b)
    elif FUNCTION == "sigmoid":
        c = tl.sigmoid(b)
    elif FUNCTION == "rsqrt":
        c = tl.rsqrt(b)
    else:
        c = tl.erf(b)
    tl.store(out + at, c)


@pytest.mark.parametrize("function", ["exp", "log2", "sigmoid", "rsqrt", "erf"])
def test_functions_between_casts(function: str) -> None:
    x = numbers(2, positive=True).clamp(max=20)
    out = torch.empty(64, dtype=torch.bfloat16)
    function_kernel[(1,)](x, out, FUNCTION=function)
    expected = getattr(torch, function)(x.double())
    assert (out.double() - expected).abs().div(expected.abs().clamp(min=1e-30)).max() <= 2**-8


@triton.jit
def fold_kernel(x, out, places):
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    b = tl.load(x + row * 16 + column)
    at = tl.arange(0, 4)
    tl.store(out + at, tl.sum(b, 1))
    tl.store(out + 4 + at, tl.max(b, 1))
    tl.store(out + 8 + at, tl.min(b, 1))
    tl.store(out + 12, tl.sum(b))
    tl.store(places + at, tl.argmax(b, 1))


def test_reductions() -> None:
    x = numbers(3).view(4, 16)
    out, places = torch.empty(13, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    fold_kernel[(1,)](x, out, places)
    assert torch.equal(out[:4], x.float().sum(1).bfloat16())
    assert torch.equal(out[4:8], x.amax(1)) and torch.equal(out[8:12], x.amin(1))
    assert torch.equal(out[12], x.float().sum().bfloat16())
    assert torch.equal(places.long(), x.float().argmax(1))


@triton.jit
def dot_kernel(x, y, out):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    a, b = tl.load(x + i * 16 + j), tl.load(y + i * 16 + j)
    tl.store(out + i * 16 + j, tl.dot(a, tl.trans(b), acc=tl.full((16, 16), 2.0, tl.float32)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x, y = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](x, y, out)
    torch.testing.assert_close(out, x.float() @ y.float().T + 2.0, rtol=1e-6, atol=1e-5)


@triton.jit
def cast_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(x.numel(), dtype=dtype)
    cast_kernel[(x.numel() // 256,)](x, out, BLOCK=256)
    return out


def rounding_cases() -> Tensor:
    """float32 around every step of the narrow types: ties, carries, subnormals, the largest."""
    exact = torch.arange(-(2**15), 2**15, 37, dtype=torch.int16).view(torch.bfloat16).float()
    exact = exact[exact.isfinite()]
    bits = exact.view(torch.int32)
    moved = [(bits + step).view(torch.float32) for step in (0, 0x7FFF, 0x8000, 0x8001, 0x18000)]
    small = torch.arange(-460, 460) / 1024
    spread = torch.randn(2048, generator=torch.Generator().manual_seed(5)) * 200
    joined = torch.cat([*moved, small, spread, torch.tensor([0.0, -0.0])])
    joined = joined[joined.isfinite()]
    return torch.cat([joined, torch.zeros(-len(joined) % 256)])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.itemsize == 2 else torch.int8)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=lambda d: str(d)[6:]
)
def test_casts_round_to_nearest_even_and_back_exactly(dtype: torch.dtype) -> None:
    x = rounding_cases()
    if dtype != torch.bfloat16:  # which saturates
        limit = torch.finfo(dtype).max
        expected = x.clamp(-limit, limit).to(dtype)
    else:
        expected = x.to(dtype)
    narrow = cast(x, dtype)
    assert torch.equal(bits(narrow), bits(expected))
    assert torch.equal(cast(narrow, torch.float32), expected.float())


def test_casts_between_narrow_types_and_from_integers() -> None:
    x = rounding_cases().bfloat16()
    expected: Any = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(bits(cast(x, torch.float8_e4m3fn)), bits(expected))
    assert torch.equal(cast(expected, torch.bfloat16), expected.bfloat16())
    whole = torch.arange(-4096, 4096, dtype=torch.int32)
    assert torch.equal(cast(whole, torch.bfloat16), whole.bfloat16())
    assert torch.equal(cast(whole[-256:].bfloat16(), torch.int32), whole[-256:].bfloat16().int())


def test_infinities_and_nan_survive() -> None:
    x = torch.zeros(256)
    x[:3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
    got = cast(x, torch.bfloat16)
    assert torch.equal(got[:2].float(), x[:2]) and got[2].isnan() and not got[3:].any()
    assert cast(got, torch.float32)[2].isnan()


@triton.jit
def doubled(b):
    return b + b


@triton.jit
def helped_kernel(x, out, FAIL: tl.constexpr):
    at = tl.arange(0, 64)
    b = doubled(doubled(tl.load(x + at)))
    tl.store(out + at, b + tl.sum(b, 0))
    if FAIL:
        tl.static_assert(False)


def test_the_language_is_as_before_after_a_launch_with_helpers() -> None:
    """What tests/support/triton_speed.py puts in place for a launch it takes away, in any case."""
    functions = {name: getattr(tl, name) for name in ("load", "arange", "reduce", "range")}
    x, out = numbers(6).float(), torch.empty(64)
    for fail in (False, True, False):
        out.zero_()
        with pytest.raises(InterpreterError) if fail else nullcontext():
            helped_kernel[(1,)](x, out, FAIL=fail)
        torch.testing.assert_close(out, 4 * x + 4 * x.sum())
        assert all(getattr(tl, name) is one for name, one in functions.items())
        assert tl.core.is_builtin(tl.core.load)
