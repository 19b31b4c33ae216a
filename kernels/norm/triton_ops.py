"""RMS normalisation on a GPU: one program per row, the row read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import launch, power_of_two


@triton.jit
def rms_norm_kernel(x, weight, out, stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_x = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(weight + column, mask=inside, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / WIDTH + eps)
    # The published code rounds the normalised value before the weight.
    b_y = (b_x * scale).to(out.dtype.element_ty) * b_w.to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, b_y, mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """As `torch_ops.rms_norm`. Rows of x may lie apart (its last axis must be dense)."""
    width = x_TH.shape[-1]
    x_RH = x_TH if x_TH.dim() == 2 else x_TH.reshape(-1, width)
    out = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    block = power_of_two(width)
    launch(
        rms_norm_kernel,
        (x_RH.shape[0],),
        x_RH,
        weight_H,
        out,
        x_RH.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


@triton.jit
def gated_rms_norm_kernel(x, weight, gate, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_x = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    b_w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, 0) / WIDTH + eps)
    b_y = b_x * scale * b_w * tl.sigmoid(b_gate)
    tl.store(out + row * WIDTH + column, b_y.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(x_THD: Tensor, weight_D: Tensor, gate_THD: Tensor, eps: float) -> Tensor:
    """As `torch_ops.gated_rms_norm`."""
    width = x_THD.shape[-1]
    out = torch.empty(gate_THD.shape, dtype=gate_THD.dtype, device=gate_THD.device)
    block = power_of_two(width)
    launch(
        gated_rms_norm_kernel,
        (out.numel() // width,),
        x_THD.contiguous(),
        weight_D,
        gate_THD.contiguous(),
        out,
        eps,
        WIDTH=width,
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return out


def warps_for(block: int) -> int:
    """Eight elements per thread, at most 16 warps."""
    return min(16, max(1, block // 256))
