"""Absorbed latent attention over a paged cache on a GPU, and the gate on its output.

A row's context is cut at absolute positions, so its bits depend neither on its companions nor on
how wide their page tables are: the number of splits is that of the table's width, a split behind
the row's end does nothing, and a second kernel adds up what the splits found, in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.launch import blocks, dense_rows, launch, power_of_two, target
from expertmesh.kernels.mla.types import PAGE

LOG2_E = 1.4426950408889634
# The first EQUAL splits have SPLIT tokens each. Behind them every doubling of the position takes
# EQUAL / 2 splits, twice as long as those before: a million tokens are 96 splits, not 512, and none
# is longer than a sixteenth of what lies before it.
SPLIT, EQUAL = 2048, 32
TOGETHER = 8  # splits that the second kernel reads at a time

__all__ = ["mla_decode", "mla_plan", "output_gate", "splits_of"]


def splits_of(tokens: int) -> int:
    """How many splits a context of that many tokens has."""
    begin = SPLIT * EQUAL
    if tokens <= begin:
        return blocks(tokens, SPLIT)
    splits, size = EQUAL, 2 * SPLIT
    while tokens > 2 * begin:
        begin, size, splits = 2 * begin, 2 * size, splits + EQUAL // 2
    return splits + blocks(tokens - begin, size)


@triton.jit
def _split(index, SPLIT: tl.constexpr, EQUAL: tl.constexpr):
    """First token of a split and the first behind it."""
    half: tl.constexpr = EQUAL // 2
    octave = tl.maximum(index - half, 0) // half
    # In units of SPLIT << octave the octaves behind the first begin at EQUAL / 2.
    place = index - octave * half
    return (place * SPLIT) << octave, ((place + 1) * SPLIT) << octave


# One binary for every width of table and wherever the lengths lie in the array that brings them: a
# new one would take ten seconds in the middle of serving.
@triton.jit(
    do_not_specialize=["splits", "table_stride"], do_not_specialize_on_alignment=["lengths"]
)
def mla_decode_kernel(
    q_latent, q_rope, cache, table, lengths, out, part, peak, total,
    latent_stride_b, latent_stride_h, rope_stride_b, rope_stride_h, table_stride, scale, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, EQUAL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_r: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of BLOCK_H heads of one row within one split, base-2 softmax.

    A row with one split is finished here. Otherwise: part, the unnormalised sum of the latents;
    peak, the largest score; total, the sum of the weights.
    """
    # Groups of heads that read the same latents run side by side.
    group, split = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    begin, end = _split(split, SPLIT, EQUAL)
    if begin < length or split == 0:
        head = group * BLOCK_H + tl.arange(0, BLOCK_H)
        column, rope_column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_r)
        here, inside = head < HEADS, column < RANK
        rope_inside = rope_column < ROPE
        b_q = tl.load(
            q_latent + row * latent_stride_b + head[:, None] * latent_stride_h + column[None, :],
            mask=here[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        b_q_rope = tl.load(
            q_rope + row * rope_stride_b + head[:, None] * rope_stride_h + rope_column[None, :],
            mask=here[:, None] & rope_inside[None, :], other=0.0,
        )  # fmt: skip
        b_peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        b_total = tl.zeros([BLOCK_H], tl.float32)
        b_sum = tl.zeros([BLOCK_H, BLOCK_R], tl.float32)
        token = tl.arange(0, BLOCK_T)
        end = tl.minimum(end, length)
        pages = table + row * table_stride
        page = tl.load(pages + begin // PAGE, mask=begin < end, other=0).to(tl.int64)
        for first in range(begin, end, BLOCK_T):
            start = cache + (page * PAGE + first % PAGE) * (RANK + ROPE)
            # Known before its latents are asked for.
            following = first + BLOCK_T
            page = tl.load(pages + following // PAGE, mask=following < end, other=0).to(tl.int64)
            valid = token < length - first
            at = token[:, None] * (RANK + ROPE)
            # What lies behind the last token may be anything: it is not read.
            b_latent = tl.load(
                start + (at + column[None, :]), mask=valid[:, None] & inside[None, :], other=0.0
            )
            b_rope = tl.load(
                start + RANK + (at + rope_column[None, :]),
                mask=valid[:, None] & rope_inside[None, :], other=0.0,
            )  # fmt: skip
            b_score = tl.dot(b_q, tl.trans(b_latent), input_precision=PRECISION)
            b_score = tl.dot(b_q_rope, tl.trans(b_rope), b_score, input_precision=PRECISION)
            b_score = tl.where(valid[None, :], b_score * scale, float("-inf"))
            b_new = tl.maximum(b_peak, tl.max(b_score, 1))
            b_weight = tl.exp2(b_score - b_new[:, None])
            b_kept = tl.exp2(b_peak - b_new)
            b_total = b_total * b_kept + tl.sum(b_weight, 1)
            b_sum = tl.dot(
                b_weight.to(b_latent.dtype), b_latent, b_sum * b_kept[:, None],
                input_precision=PRECISION,
            )  # fmt: skip
            b_peak = b_new
        place = row * HEADS + head
        if length <= SPLIT:
            # Without a token all sums are 0.
            b_sum = b_sum / tl.where(length > 0, b_total, 1.0)[:, None]
            tl.store(
                out + place[:, None] * RANK + column[None, :],
                b_sum.to(out.dtype.element_ty),
                mask=here[:, None] & inside[None, :],
            )
        else:
            place = (row * splits + split) * HEADS + head
            tl.store(peak + place, b_peak, mask=here)
            tl.store(total + place, b_total, mask=here)
            tl.store(
                part + place[:, None] * RANK + column[None, :],
                b_sum,
                mask=here[:, None] & inside[None, :],
            )


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lengths"])
def mla_combine_kernel(
    part, peak, total, lengths, out, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr,
    SPLIT: tl.constexpr, EQUAL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One head of one row: its splits in order, BLOCK_S at a time. Rows with one are finished."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    if length > SPLIT:
        column = tl.arange(0, BLOCK_R)
        inside = column < RANK
        number = tl.arange(0, BLOCK_S)
        b_peak = tl.full([1], float("-inf"), tl.float32)
        b_total = tl.zeros([1], tl.float32)
        b_sum = tl.zeros([BLOCK_R], tl.float32)
        for first in range(0, splits, BLOCK_S):
            begin, _ = _split(first + number, SPLIT, EQUAL)
            found = (begin < length) & (first + number < splits)
            place = (row * splits + first + number) * HEADS + head
            b_scores = tl.load(peak + place, mask=found, other=float("-inf"))
            b_weights = tl.load(total + place, mask=found, other=0.0)
            b_parts = tl.load(
                part + place[:, None] * RANK + column[None, :],
                mask=found[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            b_new = tl.maximum(b_peak, tl.max(b_scores, 0))
            b_kept = tl.exp2(b_peak - b_new)
            b_share = tl.exp2(b_scores - b_new)
            b_total = b_total * b_kept + tl.sum(b_weights * b_share, 0)
            b_sum = b_sum * b_kept + tl.sum(b_parts * b_share[:, None], 0)
            b_peak = b_new
        at = out + (row * HEADS + head) * RANK + column
        tl.store(at, (b_sum / b_total).to(out.dtype.element_ty), mask=inside)


def mla_decode(
    q_latent_BHR: Tensor,
    q_rope_BHr: Tensor,
    cache: Tensor,
    page_table_BN: Tensor,
    lengths_B: Tensor,
    scale: float,
    plan: object = None,
) -> Tensor:
    """As `torch_ops.mla_decode`. The cache must be dense; queries and tables are read in place
    where their last axes are.

    A row of length 0 (padding of a static batch) reads nothing and gives zeros. `plan` is not
    needed: each program reads its row's table. Besides the result, one float32 latent per row, head
    and split is written and read where the table is wider than one split.
    """
    batch, heads, rank = q_latent_BHR.shape
    rope, pages = q_rope_BHr.shape[2], page_table_BN.shape[1]
    q_latent_BHR, q_rope_BHr = dense_rows(q_latent_BHR), dense_rows(q_rope_BHr)
    page_table_BN, lengths_B = dense_rows(page_table_BN), dense_rows(lengths_B)
    splits = max(1, splits_of(pages * PAGE))
    out = torch.empty(batch, heads, rank, dtype=q_latent_BHR.dtype, device=q_latent_BHR.device)
    partial = (batch, splits if splits > 1 else 0, heads)
    part = torch.empty(*partial, rank, dtype=torch.float32, device=out.device)
    peak = torch.empty(partial, dtype=torch.float32, device=out.device)
    total = torch.empty(partial, dtype=torch.float32, device=out.device)
    block_h, block_t, warps, stages = _tiles(heads, cache.element_size())
    launch(
        mla_decode_kernel,
        (blocks(heads, block_h), splits, batch),
        q_latent_BHR,
        q_rope_BHr,
        cache,
        page_table_BN,
        lengths_B,
        out,
        part,
        peak,
        total,
        q_latent_BHR.stride(0),
        q_latent_BHR.stride(1),
        q_rope_BHr.stride(0),
        q_rope_BHr.stride(1),
        page_table_BN.stride(0),
        scale * LOG2_E,
        splits,
        HEADS=heads,
        RANK=rank,
        ROPE=rope,
        PAGE=PAGE,
        SPLIT=SPLIT,
        EQUAL=EQUAL,
        BLOCK_H=block_h,
        BLOCK_T=block_t,
        BLOCK_R=max(16, power_of_two(rank)),
        BLOCK_r=max(16, power_of_two(rope)),
        PRECISION="ieee",
        num_warps=warps,
        num_stages=stages,
    )
    if splits > 1:
        launch(
            mla_combine_kernel,
            (heads, batch),
            part,
            peak,
            total,
            lengths_B,
            out,
            splits,
            HEADS=heads,
            RANK=rank,
            SPLIT=SPLIT,
            EQUAL=EQUAL,
            BLOCK_S=TOGETHER,
            BLOCK_R=power_of_two(rank),
            num_warps=4,
        )
    return out


def _tiles(heads: int, itemsize: int) -> tuple[int, int, int, int]:
    """Heads and tokens of a tile, warps, stages.

    A tile's latents are in shared memory once and serve as keys and as values. The sum of 64 heads
    fills half the registers of 8 warps: then Hopper's wide matmul applies, two tiles of 64 tokens
    and the queries take 216 KB, and 96 heads read every row twice, side by side. 32 heads leave
    none idle and room for three tiles; AMD's 64 KB hold one tile of 32 tokens.
    """
    here = target()
    if itemsize > 2 and here:
        return 16, 16, 4, 1  # no tensor cores: exact products, slowly
    if here.startswith("gfx"):
        block_h, block_t, warps, stages = 32, 32, 4, 2
    elif here in ("sm_90", ""):
        block_h, block_t, warps, stages = 64, 64, 8, 2
    elif here.startswith("sm_10"):
        block_h, block_t, warps, stages = 32, 64, 8, 3
    else:
        block_h, block_t, warps, stages = 32, 32, 8, 2
    return min(block_h, max(16, power_of_two(heads))), block_t, warps, stages


def mla_plan(page_table_BN: Tensor, lengths_B: Tensor) -> None:
    """Nothing: `mla_decode` needs no bookkeeping of a step."""


@triton.jit
def output_gate_kernel(
    values, gate, out, values_stride, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_x = tl.load(values + row * values_stride + column, mask=inside, other=0.0)
    b_gate = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    # The sigmoid is rounded before the product: the definition stays in out's dtype throughout.
    b_sigmoid = tl.sigmoid(b_gate).to(gate.dtype.element_ty).to(tl.float32)
    b_y = b_x.to(tl.float32) * b_sigmoid
    tl.store(out + row * WIDTH + column, b_y.to(out.dtype.element_ty), mask=inside)


def output_gate(out_TV: Tensor, gate_TV: Tensor) -> Tensor:
    """As `torch_ops.output_gate`. Rows may lie apart."""
    rows, width = out_TV.shape
    out_TV, gate_TV = dense_rows(out_TV), dense_rows(gate_TV)
    gated = torch.empty(rows, width, dtype=out_TV.dtype, device=out_TV.device)
    block = min(1024, power_of_two(width))
    launch(
        output_gate_kernel,
        (rows, blocks(width, block)),
        out_TV,
        gate_TV,
        gated,
        out_TV.stride(0),
        gate_TV.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
    )
    return gated
