"""The gated activation on a GPU: by itself, and as the end of the experts' first product."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.launch import blocks, dense_rows, launch

_BLOCK = 1024


@triton.jit
def tanh(x):
    """Within 1e-7 relative, small x included, where exponentials alone cancel.

    The polynomial is tanh(x) / x in x^2, fitted at Chebyshev nodes up to 0.625.
    """
    z = x * x
    near = -0.05372267961502075 + z * (0.020595679059624672 - z * 0.005664775148034096)
    near = x + x * z * (-0.3333326280117035 + z * (0.13331149518489838 + z * near))
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def gated(gate, up, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr):
    """situ or silu of float32 blocks; beta 0: silu, linear beta 0: up as it is."""
    left = gate
    if BETA != 0.0:
        left = BETA * tanh(gate * (1.0 / BETA))
    right = up
    if LINEAR_BETA != 0.0:
        right = LINEAR_BETA * tanh(up * (1.0 / LINEAR_BETA))
    return left * tl.sigmoid(gate) * right


@triton.jit
def glu_kernel(
    x,
    out,
    stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HALF
    b_gate = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    b_up = tl.load(x + row * stride + HALF + column, mask=inside, other=0.0).to(tl.float32)
    b_y = gated(b_gate, b_up, BETA, LINEAR_BETA)
    tl.store(out + row * HALF + column, b_y.to(out.dtype.element_ty), mask=inside)


def betas(spec: Glu) -> dict[str, Any]:
    """The constants of `gated`."""
    if spec.kind == "silu":
        return {"BETA": 0.0, "LINEAR_BETA": 0.0}
    return {"BETA": spec.beta, "LINEAR_BETA": spec.linear_beta or 0.0}


def glu(gate_up_T2I: Tensor, spec: Glu) -> Tensor:
    """As `torch_ops.glu`. Rows may lie apart."""
    *lead, width = gate_up_T2I.shape
    half = width // 2
    x_R2I = dense_rows(gate_up_T2I if len(lead) == 1 else gate_up_T2I.reshape(-1, width))
    out = torch.empty((*lead, half), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    launch(
        glu_kernel,
        (x_R2I.shape[0], blocks(half, _BLOCK)),
        x_R2I,
        out,
        x_R2I.stride(0),
        HALF=half,
        BLOCK=_BLOCK,
        **betas(spec),
    )
    return out
