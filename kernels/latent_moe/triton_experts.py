"""The experts of a layer on a GPU: two grouped products over blocks of sorted rows.

Rows are the left operand, so rows and weights are both loaded as they lie. Where the weights are
packed the compiler turns the product around itself: unpacked numbers go from registers into the
tensor cores. (Written that way round it would no longer load the rows ahead.)
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.latent_moe.tables import FLOAT32, MXFP4, ExpertTable
from expertmesh.kernels.latent_moe.triton_glu import betas, gated
from expertmesh.kernels.latent_moe.triton_permute import Placement, place, weighted_sum
from expertmesh.kernels.latent_moe.types import Experts, Glu
from expertmesh.kernels.launch import blocks, dense_rows, interpreted, launch, power_of_two, target

# How many tokens' choices are computed here, the host does not know: hidden values and terms have
# room for all of them, 0.8 GB in K3 for so many tokens on an actor. More tokens go in turns; that
# the experts are read again costs a tenth of their products then.
MOST_TOKENS = 4096


@triton.jit
def _at(address, TYPE: tl.constexpr):
    """A pointer to TYPE; the compiler must be told again that it is aligned."""
    return tl.multiple_of(address.to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _packed(codes, scales, row, begin, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """uint8 codes [N, DEPTH / 2] and scales [N, DEPTH / 32] of `row` [N] from column `begin`.

    Zeros, which are the number 0, behind the last column.
    """
    byte = begin // 2 + tl.arange(0, DEPTH // 2)[None, :]
    group = begin // 32 + tl.arange(0, DEPTH // 32)[None, :]
    at_code = codes + row * (WIDTH // 2) + byte
    at_scale = scales + row * (WIDTH // 32) + group
    if WIDTH % DEPTH == 0:
        return tl.load(at_code), tl.load(at_scale)
    b_code = tl.load(at_code, mask=byte < WIDTH // 2, other=0)
    return b_code, tl.load(at_scale, mask=group < WIDTH // 32, other=0)


@triton.jit
def _unpacked(b_code, b_scale, N: tl.constexpr, DEPTH: tl.constexpr):
    """Their values [N, DEPTH], float32, exact.

    The three bits of a magnitude, put where a float has the end of its exponent and the begin of
    its mantissa, make that number times 2^-126, as a subnormal too.
    """
    b_code = tl.join(b_code & 15, b_code >> 4).reshape(N, DEPTH // 32, 32).to(tl.uint32)
    bits = ((b_code & 7) << 22) | ((b_code & 8) << 28)
    b_value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    exponent = b_scale.to(tl.uint32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is a subnormal
    b_unit = bits.to(tl.float32, bitcast=True)
    return (b_value * b_unit[:, :, None]).reshape(N, DEPTH)


@triton.jit
def _add_product(
    b_acc,
    b_x,
    matrix,
    scales,
    row,
    begin,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """b_acc [N, R] + matrix[row, begin : begin + DEPTH] @ b_x [DEPTH, R]."""
    if FORM == 1:
        codes, scales = _at(matrix, tl.uint8), _at(scales, tl.uint8)
        b_code, b_scale = _packed(codes, scales, row, begin, WIDTH, DEPTH)
        if SCALED_DOT:
            return tl.dot_scaled(
                b_x, None, "bf16", tl.trans(b_code), b_scale, "e2m1", b_acc, fast_math=True
            )
        b_w = _unpacked(b_code, b_scale, N, DEPTH)
    else:
        column = begin + tl.arange(0, DEPTH)[None, :]
        if FORM == 2:
            at = _at(matrix, tl.bfloat16) + row * WIDTH + column
        else:
            at = _at(matrix, tl.float32) + row * WIDTH + column
        b_w = tl.load(at) if WIDTH % DEPTH == 0 else tl.load(at, mask=column < WIDTH, other=0.0)
    return tl.dot(b_x, tl.trans(b_w.to(b_x.dtype)), b_acc, input_precision=PRECISION)


@triton.jit
def _rows(x, row, begin, stride, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """x[row, begin : begin + DEPTH], [R, DEPTH]; zeros behind the last number."""
    column = begin + tl.arange(0, DEPTH)[None, :]
    at = x + row[:, None].to(tl.int64) * stride + column
    return tl.load(at) if WIDTH % DEPTH == 0 else tl.load(at, mask=column < WIDTH, other=0.0)


@triton.jit(do_not_specialize=["bound", "top_k"])
def gate_up_kernel(
    z,
    order,
    listed,
    table,
    hidden,
    stride,
    bound,
    top_k,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
):
    """hidden[r] = glu(W1 z_t, W3 z_t) for the rows r of one block, token t = order[r] // top_k."""
    block = tl.program_id(1)
    slot = tl.load(listed + block)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * 7
    if tl.load(entry) != FORM:
        return
    first = tl.load(listed + bound + block)
    end = tl.load(listed + 2 * bound + block)
    w1, w1_scales = tl.load(entry + 1), tl.load(entry + 2)
    w3, w3_scales = tl.load(entry + 3), tl.load(entry + 4)

    r = first + tl.arange(0, ROWS)
    token = tl.load(order + tl.minimum(r, end - 1)) // top_k
    n = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.minimum(n, INNER - 1)[:, None].to(tl.int64)
    b_gate = tl.zeros([ROWS, N], dtype=tl.float32)
    b_up = tl.zeros([ROWS, N], dtype=tl.float32)
    for begin in range(0, WIDTH, DEPTH):
        b_z = _rows(z, token, begin, stride, WIDTH, DEPTH)
        b_gate = _add_product(
            b_gate, b_z, w1, w1_scales, row, begin, WIDTH, DEPTH, N, FORM, SCALED_DOT, PRECISION
        )
        b_up = _add_product(
            b_up, b_z, w3, w3_scales, row, begin, WIDTH, DEPTH, N, FORM, SCALED_DOT, PRECISION
        )
    b_h = gated(b_gate, b_up, BETA, LINEAR_BETA).to(hidden.dtype.element_ty)
    inside = (r < end)[:, None] & (n < INNER)[None, :]
    tl.store(hidden + r[:, None].to(tl.int64) * INNER + n[None, :], b_h, mask=inside)


@triton.jit(do_not_specialize=["bound"])
def down_kernel(
    hidden,
    listed,
    table,
    y,
    bound,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    DEPTH: tl.constexpr,
    FORM: tl.constexpr,
    SCALED_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[r] = W2 hidden[r] for the rows r of one block."""
    block = tl.program_id(1)
    slot = tl.load(listed + block)
    if slot < 0:
        return
    entry = table + slot.to(tl.int64) * 7
    if tl.load(entry) != FORM:
        return
    first = tl.load(listed + bound + block)
    end = tl.load(listed + 2 * bound + block)
    w2, w2_scales = tl.load(entry + 5), tl.load(entry + 6)

    r = first + tl.arange(0, ROWS)
    source = tl.minimum(r, end - 1)
    n = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.minimum(n, WIDTH - 1)[:, None].to(tl.int64)
    b_y = tl.zeros([ROWS, N], dtype=tl.float32)
    for begin in range(0, INNER, DEPTH):
        b_h = _rows(hidden, source, begin, INNER, INNER, DEPTH)
        b_y = _add_product(
            b_y, b_h, w2, w2_scales, row, begin, INNER, DEPTH, N, FORM, SCALED_DOT, PRECISION
        )
    inside = (r < end)[:, None] & (n < WIDTH)[None, :]
    at = y + r[:, None].to(tl.int64) * WIDTH + n[None, :]
    tl.store(at, b_y.to(y.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """n: outputs of a block. depth: of a step along the summed axis."""

    n: int
    depth: int
    warps: int
    stages: int


def block_rows(tokens: int, top_k: int, table: ExpertTable, dtype: torch.dtype) -> int:
    """Rows per block: about what an expert gets, where between the two ways rows come: all to every
    process, or only those with an expert there, four times as many an expert in K3."""
    expected = 2 * tokens * top_k // table.slots_E.shape[0]
    most = 64 if dtype == torch.float32 or target().startswith("gfx") else 128
    return min(most, max(16, power_of_two(expected)))


def tiles(rows: int, form: int, dtype: torch.dtype) -> Tiles:
    """What compiles for all three GPUs without spilling registers."""
    gpu = target()
    amd = gpu.startswith("gfx")
    if dtype == torch.float32:
        return Tiles(64, 32, 4, 2 if amd else 3)
    halved = form == FLOAT32  # twice the bytes
    if rows <= 32:
        return Tiles(64, 64 if halved else 128, 4, 2 if amd else 4)
    if rows == 128 and form == MXFP4 and gpu.startswith("sm_10"):
        return Tiles(64, 128, 8, 3)
    return Tiles(128, 32 if halved else 64, 8, 2 if amd else 3)


def experts_partial_sum(
    z_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    weights_of: Experts,
    spec: Glu,
    *,
    sum_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """As `torch_ops.experts_partial_sum`, but for four things.

    The experts are those of `weights_of.table()`, read as they are stored. A token that chose an
    expert which is not in the table gets NaN: the host does not know of it. The hidden values are
    rounded to z's type once, after the activation. For bf16 rows the scale 2^-127 counts as 0 and
    the scale byte 255, which no checkpoint may have, is not NaN.
    """
    out_TD = torch.empty(z_TD.shape, dtype=sum_dtype, device=z_TD.device)
    table = weights_of.table()
    parts = (part.split(MOST_TOKENS) for part in (dense_rows(z_TD), ids_TK, weights_TK, out_TD))
    for z, ids, weights, out in zip(*parts, strict=True):
        _partial_sum(z, ids, weights, table, spec, out)
    return out_TD


def _partial_sum(
    z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, table: ExpertTable, spec: Glu, out_TD: Tensor
) -> None:
    tokens, width = z_TD.shape
    rows = block_rows(tokens, ids_TK.shape[1], table, z_TD.dtype)
    placement = place(ids_TK, table, rows)
    hidden_RI, y_RD = (
        torch.empty((placement.rows, size), dtype=z_TD.dtype, device=z_TD.device)
        for size in (table.inner, width)
    )
    for form in table.forms:
        _grouped(z_TD, placement, table, hidden_RI, y_RD, spec, rows, form)
    weighted_sum(y_RD, placement, weights_TK, out_TD)


def _grouped(
    z_TD: Tensor,
    placement: Placement,
    table: ExpertTable,
    hidden_RI: Tensor,
    y_RD: Tensor,
    spec: Glu,
    rows: int,
    form: int,
) -> None:
    """Both products of the experts stored in `form`.

    The blocks that have rows begin first: programs of one block share its rows in the cache, and
    those without rows, for which the static bound makes room, end at once behind the others.
    """
    width, inner, listed = z_TD.shape[1], table.inner, placement.listed
    tile = tiles(rows, form, z_TD.dtype)
    packed_bf16 = form == MXFP4 and z_TD.dtype == torch.bfloat16
    common: dict[str, Any] = {
        "WIDTH": width,
        "INNER": inner,
        "ROWS": rows,
        "N": tile.n,
        "DEPTH": tile.depth,
        "FORM": form,
        "SCALED_DOT": packed_bf16 and not interpreted(),
        "PRECISION": "tf32x3" if target().startswith("sm_") else "ieee",
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    launch(
        gate_up_kernel,
        (blocks(inner, tile.n), placement.blocks),
        z_TD,
        placement.order,
        listed,
        table.rows,
        hidden_RI,
        z_TD.stride(0),
        placement.blocks,
        placement.position.shape[1],
        **common,
        **betas(spec),
    )
    launch(
        down_kernel,
        (blocks(width, tile.n), placement.blocks),
        hidden_RI,
        listed,
        table.rows,
        y_RD,
        placement.blocks,
        **common,
    )
