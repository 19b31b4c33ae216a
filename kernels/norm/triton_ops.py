"""RMS normalisation on a GPU: every row read once, several narrow rows to a program."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import blocks, dense_rows, launch, power_of_two, warps_of


# One binary for any number of rows: a new one would be compiled in the middle of serving.
@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x, weight, out, rows, stride, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    b_x = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / WIDTH + eps)
    # The published code rounds the normalised value before the weight.
    b_y = (b_x * scale[:, None]).to(out.dtype.element_ty) * b_w.to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, b_y, mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """As `torch_ops.rms_norm`. The rows of a 2-d x may lie apart: they are read in place."""
    width = x_TH.shape[-1]
    x_RH = dense_rows(x_TH if x_TH.dim() == 2 else x_TH.reshape(-1, width))
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    rows, block, warps = tiling(width)
    launch(
        rms_norm_kernel,
        (blocks(x_RH.shape[0], rows),),
        x_RH,
        weight_H,
        out,
        x_RH.shape[0],
        x_RH.stride(0),
        eps,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out


@triton.jit(do_not_specialize=["rows"])
def gated_rms_norm_kernel(
    x,
    weight,
    gate,
    out,
    rows,
    x_stride,
    x_head_stride,
    gate_stride,
    gate_head_stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = row // HEADS, row % HEADS
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    x_at = x + token * x_stride + head * x_head_stride + column
    gate_at = gate + token * gate_stride + head * gate_head_stride + column
    b_x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    b_gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 1) / WIDTH + eps)
    b_y = b_x * scale[:, None] * b_w * tl.sigmoid(b_gate)
    tl.store(out + row * WIDTH + column, b_y.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x_THD: Tensor, weight_D: Tensor, gate_THD: Tensor, eps: float) -> Tensor:
    """As `torch_ops.gated_rms_norm`. A gate that is a slice of a wider product is read in place."""
    tokens, heads, width = x_THD.shape
    x_THD, gate_THD = dense_rows(x_THD), dense_rows(gate_THD)
    out = torch.empty(gate_THD.shape, dtype=gate_THD.dtype, device=gate_THD.device)
    rows, block, warps = tiling(width)
    launch(
        gated_rms_norm_kernel,
        (blocks(tokens * heads, rows),),
        x_THD,
        weight_D,
        gate_THD,
        out,
        tokens * heads,
        *x_THD.stride()[:2],
        *gate_THD.stride()[:2],
        eps,
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        num_warps=warps,
    )
    return out


def tiling(width: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps: 2,048 elements where a row is shorter,
    else one row."""
    block = power_of_two(width)
    rows = max(1, 2048 // block)
    return rows, block, warps_of(block)
