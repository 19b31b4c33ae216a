"""Rows to their experts and back, without the host and without atomics.

`place` sorts the (token, choice) pairs by expert and cuts each expert's rows into blocks for the
grouped products; `weighted_sum` collects the results of a token in the order of its choices.
Neither depends on the order in which programs run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.latent_moe.tables import ExpertTable
from expertmesh.kernels.launch import blocks, launch, power_of_two

_LONGEST = 4096


@triton.jit
def _slots_of(ids, slots, pair, pairs, experts):
    """(ids, slots) of `pair`: -1 for no expert, -2 for one that this process does not hold."""
    b_id = tl.load(ids + pair, mask=pair < pairs, other=-1)
    known = (b_id >= 0) & (b_id < experts)
    b_slot = tl.load(slots + tl.where(known, b_id, 0), mask=known, other=-1)
    return tl.where(b_slot >= 0, b_slot, tl.where(b_id >= 0, -2, -1))


@triton.jit(do_not_specialize=["pairs", "experts", "rows", "held", "bound"])
def place_kernel(
    ids,
    slots,
    order,
    position,
    listed,
    pairs,
    experts,
    rows,
    held,
    bound,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program `slot` finds its pairs and writes their places and its part of the block list.

    With `before` pairs in lower slots, its blocks begin at before // ROWS + slot: no expert needs
    to know how many blocks the others fill, and what stays empty between them is marked so. A pair
    that would lie behind `rows` gets no place.
    """
    slot = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], dtype=tl.int32)
    mine = tl.zeros([BLOCK], dtype=tl.int32)
    for begin in range(0, pairs, BLOCK):
        b_slot = _slots_of(ids, slots, begin + lane, pairs, experts)
        lower += ((b_slot >= 0) & (b_slot < slot)).to(tl.int32)
        mine += (b_slot == slot).to(tl.int32)
    row = tl.sum(lower, 0)
    before = tl.minimum(row, rows)
    end = tl.minimum(row + tl.sum(mine, 0), rows)

    for begin in range(0, pairs, BLOCK):
        pair = begin + lane
        b_slot = _slots_of(ids, slots, pair, pairs, experts)
        hit = b_slot == slot
        place = row + tl.cumsum(hit.to(tl.int32), 0) - 1
        tl.store(order + place, pair, mask=hit & (place < rows))
        tl.store(position + pair, tl.where(place < rows, place, -2), mask=hit)
        if slot == 0:
            tl.store(position + pair, b_slot, mask=(b_slot < 0) & (pair < pairs))
        row += tl.sum(hit.to(tl.int32), 0)

    first = before // ROWS + slot
    next_first = tl.where(slot + 1 >= held, bound, end // ROWS + slot + 1)
    for begin in range(first, next_first, BLOCK):
        block = begin + lane
        inside = block < next_first
        b_row = before + (block - first) * ROWS
        b_slot = tl.where((b_row < end) & (slot < held), slot, -1)
        tl.store(listed + block, b_slot, mask=inside)
        tl.store(listed + bound + block, b_row, mask=inside)
        tl.store(listed + 2 * bound + block, end + tl.zeros_like(b_row), mask=inside)


@dataclass(frozen=True, slots=True)
class Placement:
    """order: int32 [rows], the pair (token * K + choice) of a row, rows sorted by expert.
    position: int32 [T, K], the row of a pair, -1 for no expert, -2 for one that is not held and
    where there were more pairs than rows.
    listed: int32 [3, blocks]: slot (-1: an empty block), first row, the end of that expert's rows.
    rows: how many there are at most.
    """

    order: Tensor
    position: Tensor
    listed: Tensor
    rows: int

    @property
    def blocks(self) -> int:
        return self.listed.shape[1]


def place(ids_TK: Tensor, table: ExpertTable, block_rows: int) -> Placement:
    """Deals the rows of all pairs whose expert `table` holds into blocks of `block_rows`.

    A token chooses an expert at most once, so at most min(K, held) of its pairs are rows. Of ids
    that break this some get no row; nothing is written outside.
    """
    tokens, top_k = ids_TK.shape
    rows = tokens * min(top_k, table.held)
    bound = rows // block_rows + max(1, table.held)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=ids_TK.device)

    made = Placement(ints(max(1, rows)), ints(tokens, top_k), ints(3, bound), rows)
    launch(
        place_kernel,
        (max(1, table.held),),
        ids_TK.contiguous(),
        table.slots_E,
        made.order,
        made.position,
        made.listed,
        tokens * top_k,
        table.slots_E.shape[0],
        rows,
        table.held,
        bound,
        ROWS=block_rows,
        BLOCK=min(_LONGEST, max(128, power_of_two(tokens * top_k))),
        num_warps=8,
    )
    return made


@triton.jit
def weighted_sum_kernel(
    y,
    position,
    weights,
    out,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    b_sum = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
    lost = False
    for k in tl.static_range(TOP_K):
        row = tl.load(position + token * TOP_K + k)
        here = row >= 0
        weight = tl.load(weights + token * TOP_K + k, mask=here, other=0.0)
        at = tl.where(here, row, 0).to(tl.int64) * WIDTH
        b_y = tl.load(y + at + column, mask=inside & here, other=0.0).to(tl.float32)
        b_sum += (b_y * weight).to(out.dtype.element_ty)
        lost |= row == -2
    # An expert that is not held: nobody takes what is left of the sum for an answer.
    b_sum = tl.where(lost, float("nan"), b_sum)
    tl.store(out + token * WIDTH + column, b_sum, mask=inside)


def weighted_sum(y_RD: Tensor, placement: Placement, weights_TK: Tensor, out_TD: Tensor) -> None:
    """out_t = sum_k w_tk y[row of (t, k)], terms in float32, added in out's type in the order of k.

    A token that chose an expert which is not held gets NaN. out: dense rows.
    """
    tokens, top_k = weights_TK.shape
    width = y_RD.shape[1]
    block = min(1024, power_of_two(width))
    launch(
        weighted_sum_kernel,
        (tokens, blocks(width, block)),
        y_RD,
        placement.position,
        weights_TK.contiguous(),
        out_TD,
        WIDTH=width,
        TOP_K=top_k,
        BLOCK=block,
    )
