"""MXFP4 and FP8 rows on a GPU, bit for bit as `torch_ops`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import blocks, dense_rows, launch, power_of_two, warps_of
from expertmesh.kernels.quant.torch_ops import BLOCK as MX_BLOCK
from expertmesh.kernels.quant.torch_ops import FP8_PEAK, FP8_SMALLEST_SCALE


@triton.jit
def e2m1_value(b_code):
    """The float32 value of a 4-bit code, built from its bits; -0 keeps its sign."""
    magnitude = b_code & 7
    # Codes 2 to 7 are (1 + m/2) * 2^(e - 1) with e in the upper bits; code 1 is 0.5 alone.
    normal = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
    bits = tl.where(magnitude > 1, normal, magnitude * 0x3F000000)
    return (bits | ((b_code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def e8m0_value(b_byte):
    """2^(byte - 127) in float32: byte 0 is subnormal, 255 is NaN."""
    bits = tl.where(b_byte == 0, 0x00400000, b_byte << 23)
    return tl.where(b_byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mxfp4_decode_kernel(packed, scale, out, total, UNITS: tl.constexpr, BYTES: tl.constexpr):
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    there = unit < total
    at = unit[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    b_packed = tl.load(packed + at, mask=there[:, None], other=0).to(tl.int32)
    b_unit = e8m0_value(tl.load(scale + unit, mask=there, other=127).to(tl.int32))[:, None]
    b_low = e2m1_value(b_packed & 15) * b_unit
    b_high = e2m1_value(b_packed >> 4) * b_unit
    b_values = tl.interleave(b_low, b_high).to(out.dtype.element_ty)
    to = unit[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(out + to, b_values, mask=there[:, None])


def mxfp4_decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """As `torch_ops.mxfp4_decode`."""
    shape = (*packed.shape[:-1], 2 * packed.shape[-1])
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    launch(
        mxfp4_decode_kernel,
        (blocks(scale.numel(), MX_UNITS),),
        packed.contiguous(),
        scale.contiguous(),
        out,
        scale.numel(),
        UNITS=MX_UNITS,
        BYTES=MX_BLOCK // 2,
    )
    return out


MX_UNITS = 128  # blocks of 32 values per program: 16 bytes in and 32 values out per thread


@triton.jit
def fp8_encode_kernel(
    x,
    codes,
    scale,
    stride,
    PEAK: tl.constexpr,
    SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_x = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    # As integers, magnitudes order as the numbers do and NaN is the largest: it reaches the scale.
    magnitude = b_x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    top = tl.max(magnitude, 0)
    b_scale = tl.div_rn(top.to(tl.float32, bitcast=True), PEAK)
    b_scale = tl.where(b_scale < SMALLEST, SMALLEST, b_scale)
    b_scale = tl.where(top == 0, 1.0, b_scale)
    b_code = tl.div_rn(b_x, b_scale).to(tl.float8e4nv)
    tl.store(codes + row * WIDTH + column, b_code.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scale + row, b_scale)


def fp8_encode(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """As `torch_ops.fp8_encode`. Rows of x may lie apart."""
    rows, width = x_TD.shape
    x_TD = dense_rows(x_TD)
    codes_TD = torch.empty(rows, width, dtype=torch.uint8, device=x_TD.device)
    scale_T1 = torch.empty(rows, 1, dtype=torch.float32, device=x_TD.device)
    block = power_of_two(width)
    launch(
        fp8_encode_kernel,
        (rows,),
        x_TD,
        codes_TD,
        scale_T1,
        x_TD.stride(0),
        PEAK=FP8_PEAK,
        SMALLEST=FP8_SMALLEST_SCALE,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return codes_TD, scale_T1


@triton.jit
def fp8_decode_kernel(codes, scale, out, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_code = tl.load(codes + row * stride + column, mask=inside, other=0)
    b_value = b_code.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scale + row)
    tl.store(out + row * WIDTH + column, b_value.to(out.dtype.element_ty), mask=inside)


def fp8_decode(codes_TD: Tensor, scale_T1: Tensor, dtype: torch.dtype) -> Tensor:
    """As `torch_ops.fp8_decode`. Rows of the codes may lie apart."""
    rows, width = codes_TD.shape
    codes_TD = dense_rows(codes_TD)
    out_TD = torch.empty(rows, width, dtype=dtype, device=codes_TD.device)
    block = power_of_two(width)
    launch(
        fp8_decode_kernel,
        (rows,),
        codes_TD,
        scale_T1.contiguous(),
        out_TD,
        codes_TD.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_of(block),
    )
    return out_TD
