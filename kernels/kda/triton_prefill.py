"""Many KDA tokens per sequence on a GPU: convolution and gate, then the chunked delta rule.

Kernels: inputs (convolution, SiLU, norms, gate), window, then pairs, solve and scan of
`triton_chunk.py`. All but the scan work on all chunks at once; it walks each sequence's chunks, all
heads and blocks of state columns at once. Chunks are cut at absolute multiples of 64 and each is
computed as 64 rows, so a prefill cut there has the same bits as one in a single piece.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.kda.triton_chunk import (
    kda_pairs_kernel,
    kda_scan_kernel,
    kda_solve_kernel,
)
from expertmesh.kernels.kda.triton_common import (
    inverse_norm,
    log_decay,
    silu_as,
    stable_sigmoid,
)
from expertmesh.kernels.kda.types import CHUNK, KdaSave, KdaSpan, in_rounds
from expertmesh.kernels.launch import blocks, dense_rows, launch, power_of_two, target

WINDOW_COLUMNS = 512


@triton.jit(do_not_specialize=["tiles"])
def kda_inputs_kernel(
    qkv,
    z,
    beta,
    weight,
    a_log,
    dt_bias,
    conv_state,
    chunks,
    y,
    gates,
    scales,
    tiles,
    qkv_stride,
    z_stride,
    beta_stride,
    channel_stride,
    tap_stride,
    conv_stride,
    conv_row_stride,
    lower_bound,
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BOUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK_ROWS: tl.constexpr,
):
    """q, k or v of one head and chunk (v: its gate and beta too); missing rows become zeros.

    y: after convolution and SiLU, in the activations' type, not yet normalised; scales: what
    normalises q (with its 1/sqrt(D)) and k, and beta; gates: log-decays.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    which = tl.program_id(2)
    tile = chunk.to(tl.int64) * HEADS + head
    own = tl.arange(0, CHUNK_ROWS)
    lane = tl.arange(0, BLOCK)
    inside = lane < DIM
    first = tl.load(chunks + chunk * 4)
    begin = tl.load(chunks + chunk * 4 + 2)
    slot = tl.load(chunks + chunk * 4 + 3).to(tl.int64)
    live = own < tl.load(chunks + chunk * 4 + 1)
    row = first.to(tl.int64) + own
    valid = live[:, None] & inside[None, :]
    column = (which * HEADS + head) * DIM + lane
    b_y = tl.zeros([CHUNK_ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        source = row - (WIDTH - 1 - tap)
        b_x = tl.load(
            qkv + source[:, None] * qkv_stride + column[None, :],
            mask=valid & (source >= begin)[:, None],
            other=0.0,
        ).to(tl.float32)
        # Rows before the span's are in its window. Its first chunk may have fewer than the taps
        # reach over, so the next may need them too.
        if first - begin < WIDTH - 1:
            b_old = tl.load(
                conv_state
                + slot * conv_stride
                + (source - begin + WIDTH - 1)[:, None] * conv_row_stride
                + column[None, :],
                mask=valid & (source < begin)[:, None],
                other=0.0,
            )
            b_x += b_old.to(tl.float32)
        b_w = tl.load(weight + column * channel_stride + tap * tap_stride, mask=inside, other=0.0)
        b_y += b_w[None, :] * b_x
    b_y = silu_as(b_y, qkv)
    line = (which * tiles + tile) * CHUNK_ROWS + own
    tl.store(y + line[:, None] * BLOCK + lane[None, :], b_y.to(y.dtype.element_ty))
    if which < 2:
        b_scale = inverse_norm(tl.sum(b_y * b_y, 1)) * tl.where(which == 0, scale, 1.0)
        tl.store(scales + line, b_scale)
    else:
        b_beta = tl.load(beta + row * beta_stride + head, mask=live, other=0.0).to(tl.float32)
        tl.store(scales + line, tl.where(live, stable_sigmoid(b_beta), 0.0))
        b_z = tl.load(
            z + row[:, None] * z_stride + head * DIM + lane[None, :], mask=valid, other=0.0
        ).to(tl.float32)
        b_z += tl.load(dt_bias + head * DIM + lane, mask=inside, other=0.0)[None, :]
        b_gate = log_decay(b_z, tl.exp(tl.load(a_log + head)), lower_bound, BOUNDED)
        cell = (tile * CHUNK_ROWS + own)[:, None] * BLOCK + lane[None, :]
        tl.store(gates + cell, tl.where(valid, b_gate, 0.0))


@triton.jit(do_not_specialize_on_alignment=["spans"])
def kda_window_kernel(
    qkv,
    conv_state,
    spans,
    qkv_stride,
    conv_stride,
    conv_row_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A span's window becomes its last WIDTH - 1 rows; a shorter span keeps some old ones.

    Rows only move up, one after the other and each column in one thread: none is overwritten before
    it is read.
    """
    span = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < CHANNELS
    slot = tl.load(spans + span * 3).to(tl.int64)
    begin = tl.load(spans + span * 3 + 1).to(tl.int64)
    end = tl.load(spans + span * 3 + 2).to(tl.int64)
    window = conv_state + slot * conv_stride + column
    for tap in tl.static_range(WIDTH - 1):
        source = end - (WIDTH - 1) + tap
        b_x = tl.load(
            qkv + source * qkv_stride + column, mask=inside & (source >= begin), other=0.0
        ).to(tl.float32)
        b_x += tl.load(
            window + (source - begin + WIDTH - 1) * conv_row_stride,
            mask=inside & (source < begin),
            other=0.0,
        ).to(tl.float32)
        tl.store(window + tap * conv_row_stride, b_x.to(conv_state.dtype.element_ty), mask=inside)


class PrefillPlan(NamedTuple):
    """Int32 tables on the device.

    chunks [N, 4]: first row, rows, first row of the span, slot. scans [S, 3]: slot, first chunk,
    chunks. ends [S, 3]: slot, first row, end row.
    """

    chunks: Tensor
    scans: Tensor
    ends: Tensor


@lru_cache(maxsize=8)
def plan_prefill(spans: tuple[KdaSpan, ...], device: torch.device) -> PrefillPlan:
    """Cuts spans (none empty) into chunks. Every layer of a step has the same: one copy serves."""
    chunks: list[tuple[int, int, int, int]] = []
    scans, ends = [], []
    for slot, begin, end, position in spans:
        first, row = len(chunks), begin
        while row < end:
            stop = min(end, row + CHUNK - (position + row - begin) % CHUNK)
            chunks.append((row, stop - row, begin, slot))
            row = stop
        scans.append((slot, first, len(chunks) - first))
        ends.append((slot, begin, end))
    flat = [number for table in (chunks, scans, ends) for line in table for number in line]
    on_host = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
    on_device = on_host.to(device, non_blocking=True)
    parts = on_device.split([4 * len(chunks), 3 * len(scans), 3 * len(ends)])
    return PrefillPlan(parts[0].view(-1, 4), parts[1].view(-1, 3), parts[2].view(-1, 3))


def dot_precisions(dtype: torch.dtype) -> tuple[str, str]:
    """(PRECISION, EXACT) of float32 operands in the dots, for activations of this type.

    EXACT is for the triangular system, where large numbers cancel: with equal keys 64 terms leave
    one, and an error of the operands comes out many times larger. The system is small, so it takes
    three tensor-core products for each (AMD's matrix cores multiply float32 as it is).

    PRECISION is for all others. Float32 activations are multiplied as such. With bfloat16 ones it
    is TF32, rounded to nearest: 2^-11, an eighth of what q, k and v were rounded by (2^-8). After
    512 tokens with K3's gate the state is then off by 3e-4 of its norm and results by 3e-4; with
    operands cut off as tensor cores do by 8e-4 and 1.2e-3, all in one direction (the state shrinks
    by 7e-4); with bfloat16 operands by 2.4e-3 and 3e-3, as much as the inputs' own rounding.
    """
    exact = "ieee" if target().startswith("gfx") else "tf32x3"
    return ("tf32" if dtype == torch.bfloat16 else exact), exact


def kda_prefill(
    qkv_TC: Tensor,
    z_THD: Tensor,
    beta_TH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    saves: Sequence[KdaSave] = (),
) -> Tensor:
    """As `torch_ops.kda_prefill`; rows of qkv, z and beta and slots may lie apart. Spans of one
    slot are launched one after the other.

    Needs scratch memory while it runs: 26 D bytes per row and head with bfloat16 activations, 32 D
    with float32, and some 500 more.
    """
    rows, heads, dim = z_THD.shape
    out_THD = torch.empty(rows, heads, dim, dtype=torch.float32, device=z_THD.device)
    every = [KdaSpan._make(span) for span in spans]
    todo = [span for span in every if span.row_end > span.row_begin]
    covered = 0
    for span in (*sorted(todo, key=lambda span: span.row_begin), KdaSpan(0, rows, rows, 0)):
        if span.row_begin > covered:
            out_THD[covered : span.row_begin].zero_()
        covered = span.row_end
    qkv_TC, z_TC, beta_TH = map(dense_rows, (qkv_TC, z_THD.flatten(1), beta_TH))
    constants = conv_weight_CW, A_log_H, dt_bias_HD, lower_bound
    for together, following in in_rounds(every, saves):
        some = [span for span in together if span.row_end > span.row_begin]
        if some:
            _prefill(qkv_TC, z_TC, beta_TH, *constants, conv_state, state, some, out_THD)
        for slot, save in following:
            save.conv.copy_(conv_state[slot])
            save.state.copy_(state[slot])
    return out_THD


def _prefill(
    qkv_TC: Tensor,
    z_TC: Tensor,
    beta_TH: Tensor,
    conv_weight_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HD: Tensor,
    lower_bound: float | None,
    conv_state: Tensor,
    state: Tensor,
    todo: list[KdaSpan],
    out_THD: Tensor,
) -> None:
    """Spans of distinct slots, into their rows of out."""
    _, heads, dim = out_THD.shape
    device, channels, width = z_TC.device, qkv_TC.shape[1], conv_weight_CW.shape[1]
    plan = plan_prefill(tuple(todo), device)
    count, block = plan.chunks.shape[0], max(16, power_of_two(dim))
    tiles = count * heads
    y = torch.empty(3, tiles, CHUNK, block, dtype=qkv_TC.dtype, device=device)
    gates = torch.empty(tiles, CHUNK, block, dtype=torch.float32, device=device)
    scales = torch.empty(3, tiles, CHUNK, dtype=torch.float32, device=device)
    launch(
        kda_inputs_kernel,
        (count, heads, 3),
        qkv_TC,
        z_TC,
        beta_TH,
        conv_weight_CW,
        A_log_H,
        dt_bias_HD,
        conv_state,
        plan.chunks,
        y,
        gates,
        scales,
        tiles,
        qkv_TC.stride(0),
        z_TC.stride(0),
        beta_TH.stride(0),
        conv_weight_CW.stride(0),
        conv_weight_CW.stride(1),
        conv_state.stride(0),
        conv_state.stride(1),
        lower_bound or 0.0,
        dim**-0.5,
        HEADS=heads,
        DIM=dim,
        WIDTH=width,
        BOUNDED=lower_bound is not None,
        BLOCK=block,
        CHUNK_ROWS=CHUNK,
        num_warps=8,
    )
    launch(  # after the one that reads the windows
        kda_window_kernel,
        (len(todo), blocks(channels, WINDOW_COLUMNS)),
        qkv_TC,
        conv_state,
        plan.ends,
        qkv_TC.stride(0),
        conv_state.stride(0),
        conv_state.stride(1),
        CHANNELS=channels,
        WIDTH=width,
        BLOCK=WINDOW_COLUMNS,
        num_warps=4,
    )
    _delta_rule(y, gates, scales, plan, state, out_THD)


def _delta_rule(
    y: Tensor, gates: Tensor, scales: Tensor, plan: PrefillPlan, state: Tensor, out_THD: Tensor
) -> None:
    """What `kda_inputs_kernel` left, through the chunks: updates `state`, fills the spans' rows."""
    tiles, _, block = gates.shape
    heads, dim = out_THD.shape[1:]
    count = plan.chunks.shape[0]
    precision, exact = dot_precisions(y.dtype)
    # The largest that sm_90, sm_100 and gfx942 compile without spills. Float32 activations make
    # three products of each and need more registers: NVIDIA's scan then spills some 30 even so.
    rounded = precision == "tf32"
    pair_columns, solve_columns = min(block, 32 if rounded else 16), min(block, 64)
    value_columns = min(block, 32 if rounded else 16)

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=gates.device)

    mix, attend = scratch(tiles, CHUNK, CHUNK), scratch(tiles, CHUNK, CHUNK)
    launch(
        kda_pairs_kernel,
        (4 * count, heads),
        y,
        gates,
        scales,
        plan.chunks,
        mix,
        attend,
        tiles,
        HEADS=heads,
        BLOCK=block,
        COLS=pair_columns,
        PRECISION=precision,
        num_warps=2,
    )
    uw, q_old = scratch(2, tiles, CHUNK, block), scratch(tiles, CHUNK, block)
    k_end, keep = scratch(tiles, block, CHUNK), scratch(tiles, block)
    launch(
        kda_solve_kernel,
        (count, heads, 2 * block // solve_columns),
        y,
        gates,
        scales,
        mix,
        uw,
        q_old,
        k_end,
        keep,
        tiles,
        HEADS=heads,
        BLOCK=block,
        COLS=solve_columns,
        PRECISION=precision,
        EXACT=exact,
        num_warps=max(1, solve_columns // 16),
    )
    launch(
        kda_scan_kernel,
        (plan.scans.shape[0], heads, block // value_columns),
        uw,
        q_old,
        k_end,
        keep,
        attend,
        plan.chunks,
        plan.scans,
        state,
        out_THD,
        tiles,
        state.stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK=block,
        BLOCK_V=value_columns,
        PRECISION=precision,
        num_warps=4,
        # Two would take 200 KB of shared memory and leave one program on a multiprocessor.
        num_stages=1,
    )
