"""One KDA token per sequence on a GPU: convolution, gate and delta rule in one kernel.

Memory bound: the state is nearly all that moves, and it is read and written once. A program owns
one row and one head, so nobody else reads or writes its state [D, D] and its window. The columns of
a state do not meet, so it passes through the registers in blocks of columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.kda.triton_common import (
    inverse_norm,
    log_decay,
    silu_as,
    stable_sigmoid,
)
from expertmesh.kernels.launch import dense_rows, launch, power_of_two


@triton.jit
def recent_rows(qkv, window, column, inside, row_stride, WIDTH: tl.constexpr, TAPS: tl.constexpr):
    """[TAPS, BLOCK] float32: the window's rows, then the new one, then zeros."""
    tap = tl.arange(0, TAPS)[:, None]
    old = tl.load(
        window + tap * row_stride + column[None, :],
        mask=(tap < WIDTH - 1) & inside[None, :],
        other=0.0,
    )
    new = tl.load(qkv + column[None, :], mask=(tap == WIDTH - 1) & inside[None, :], other=0.0)
    return tl.where(tap < WIDTH - 1, old.to(tl.float32), new.to(tl.float32))


@triton.jit
def convolved(b_x, weight, column, inside, channel_stride, tap_stride, WIDTH: tl.constexpr):
    """[BLOCK]: the taps' weighted sum."""
    tap = tl.arange(0, b_x.shape[0])[:, None]
    b_w = tl.load(
        weight + column[None, :] * channel_stride + tap * tap_stride,
        mask=(tap < WIDTH) & inside[None, :],
        other=0.0,
    )
    return tl.sum(b_x * b_w, 0)


@triton.jit
def shift_window(window, b_x, column, inside, row_stride, WIDTH: tl.constexpr):
    tap = tl.arange(0, b_x.shape[0])[:, None]
    tl.store(
        window + (tap - 1) * row_stride + column[None, :],
        b_x.to(window.dtype.element_ty),
        mask=(tap >= 1) & (tap < WIDTH) & inside[None, :],
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def kda_decode_kernel(
    qkv,
    z,
    beta,
    weight,
    a_log,
    dt_bias,
    conv_state,
    state,
    slots,
    out,
    qkv_stride,
    z_stride,
    beta_stride,
    channel_stride,
    tap_stride,
    conv_stride,
    conv_row_stride,
    state_stride,
    lower_bound,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    out += (row * HEADS + head) * DIM
    if slot < 0:
        tl.store(out + lane, tl.zeros([BLOCK], tl.float32), mask=inside)
        return

    qkv += row * qkv_stride
    conv_state += slot * conv_stride
    q_column = head * DIM + lane
    k_column = q_column + HEADS * DIM
    b_xq = recent_rows(qkv, conv_state, q_column, inside, conv_row_stride, WIDTH, TAPS)
    b_xk = recent_rows(qkv, conv_state, k_column, inside, conv_row_stride, WIDTH, TAPS)
    b_q = silu_as(convolved(b_xq, weight, q_column, inside, channel_stride, tap_stride, WIDTH), qkv)
    b_k = silu_as(convolved(b_xk, weight, k_column, inside, channel_stride, tap_stride, WIDTH), qkv)
    b_q = b_q * (inverse_norm(tl.sum(b_q * b_q, 0)) * scale)
    b_k = b_k * inverse_norm(tl.sum(b_k * b_k, 0))
    key_query = tl.sum(b_k * b_q, 0)
    b_z = tl.load(z + row * z_stride + q_column, mask=inside, other=0.0).to(tl.float32)
    b_z += tl.load(dt_bias + q_column, mask=inside, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    b_decay = tl.exp(log_decay(b_z, rate, lower_bound, BOUNDED))
    learn = stable_sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    # A block smaller than the program is loaded by several threads and stored by one of them: none
    # may store before all have loaded. Here, and for each part of the state.
    tl.debug_barrier()
    shift_window(conv_state, b_xq, q_column, inside, conv_row_stride, WIDTH)
    shift_window(conv_state, b_xk, k_column, inside, conv_row_stride, WIDTH)

    state += slot * state_stride + head * DIM * DIM
    for part in range(0, BLOCK, BLOCK_V):
        value = part + tl.arange(0, BLOCK_V)
        inside_v = value < DIM
        cell = lane[:, None] * DIM + value[None, :]
        within = inside[:, None] & inside_v[None, :]
        b_state = tl.load(state + cell, mask=within, other=0.0)
        v_column = (2 * HEADS + head) * DIM + value
        b_xv = recent_rows(qkv, conv_state, v_column, inside_v, conv_row_stride, WIDTH, TAPS)
        b_v = convolved(b_xv, weight, v_column, inside_v, channel_stride, tap_stride, WIDTH)
        b_state = b_state * b_decay[:, None]
        # S^T q after the update is S^T q before it and (k . q) delta: one pass sees the old state.
        b_delta = learn * (silu_as(b_v, qkv) - tl.sum(b_state * b_k[:, None], 0))
        b_out = tl.sum(b_state * b_q[:, None], 0) + key_query * b_delta
        tl.store(out + value, b_out, mask=inside_v)
        tl.debug_barrier()
        tl.store(state + cell, b_state + b_k[:, None] * b_delta[None, :], mask=within)
        shift_window(conv_state, b_xv, v_column, inside_v, conv_row_stride, WIDTH)


def kda_decode(
    qkv_BC: Tensor,
    z_BHD: Tensor,
    beta_BH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    slots_B: Tensor,
) -> Tensor:
    """As `torch_ops.kda_decode`; a row of slot -1 touches no state and gives zero.

    Rows of qkv, z and beta and slots may lie apart. Float32 [B, H, D].
    """
    rows, heads, dim = z_BHD.shape
    z_BC, qkv_BC, beta_BH = map(dense_rows, (z_BHD.flatten(1), qkv_BC, beta_BH))
    width, block = conv_weight_CW.shape[1], power_of_two(dim)
    block_v = min(block, 64)
    out_BHD = torch.empty(rows, heads, dim, dtype=torch.float32, device=z_BHD.device)
    launch(
        kda_decode_kernel,
        (heads, rows),
        qkv_BC,
        z_BC,
        beta_BH,
        conv_weight_CW,
        A_log_H,
        dt_bias_HD,
        conv_state,
        state,
        slots_B.contiguous(),
        out_BHD,
        qkv_BC.stride(0),
        z_BC.stride(0),
        beta_BH.stride(0),
        conv_weight_CW.stride(0),
        conv_weight_CW.stride(1),
        conv_state.stride(0),
        conv_state.stride(1),
        state.stride(0),
        lower_bound or 0.0,
        dim**-0.5,
        HEADS=heads,
        DIM=dim,
        WIDTH=width,
        TAPS=power_of_two(width),
        BOUNDED=lower_bound is not None,
        BLOCK=block,
        # Half of K3's state at a time, 64 values per thread: three programs then fit on an H200's
        # multiprocessor, and some load while others compute.
        BLOCK_V=block_v,
        num_warps=min(4, max(1, block * block_v // 2048)),
    )
    return out_BHD
