"""Chunked delta rule on a GPU: products within 64 rows, their triangular system, the state's walk.

Every chunk is 64 rows in scratch memory, missing ones zero (and with log-decay zero), so nothing
here looks at lengths but the stores of results. The decay between rows s < r is the product of two
factors, each exp of a sum of log-decays on one side of a border between s and r. Such sums are
never positive and nothing is subtracted: no gate overflows, and a small log-decay is not lost
beside a huge one. Borders are those of 16-row blocks, within a block those of halves, quarters ...

Numbers of the dots, `PRECISION` and `EXACT`: see `triton_prefill.dot_precisions`.
"""

import triton
import triton.language as tl

from expertmesh.kernels.kda.triton_common import operand

BLOCK_ROWS = tl.constexpr(16)
CHUNK = tl.constexpr(64)
BLOCKS = tl.constexpr(4)


@triton.jit
def running_sum(x, SIZE: tl.constexpr, REVERSE: tl.constexpr):
    """Sums over the rows of each group of SIZE rows, from its start or (REVERSE) its end."""
    if SIZE == 1:
        return x
    else:
        groups = tl.reshape(x, [x.shape[0] // SIZE, SIZE, x.shape[1]])
        return tl.reshape(tl.cumsum(groups, 1, reverse=REVERSE), [x.shape[0], x.shape[1]])


@triton.jit
def until_end(next_gates, cell, SIZE: tl.constexpr):
    """[16, C]: log-decay of the rows behind each row up to the end of its group of SIZE rows.

    cell: offsets of the rows [16, C]; next_gates + cell: the row after each. It is loaded from
    there: subtracting a row from a sum that includes it would lose small numbers.
    """
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    b_next = tl.load(next_gates + cell, mask=(row + 1) % SIZE != 0, other=0.0)
    return running_sum(b_next, SIZE, True)


@triton.jit
def inverse_of_unit_triangle(b_m):
    """(I + m)^-1 of a strictly lower [16, 16] by substitution, row after row.

    Squaring powers of m would take four dots, but they grow like binomials before they cancel.
    """
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_ROWS)[None, :]
    b_inverse = -b_m
    for at in range(2, BLOCK_ROWS):
        b_row = tl.sum(tl.where(row == at, b_inverse, 0.0), 0)
        b_row += tl.sum(tl.expand_dims(b_row, 1) * b_inverse, 0)
        b_inverse = tl.where(row == at, b_row[None, :], b_inverse)
    return b_inverse + tl.where(row == column, 1.0, 0.0)


@triton.jit
def pairs_of_halves(
    b_q, b_k, b_gate, next_gates, cell, SIZE: tl.constexpr, PRECISION: tl.constexpr
):
    """In each group of 2 * SIZE rows, the later half against the earlier: k . k and q . k."""
    row = tl.arange(0, BLOCK_ROWS)
    late = ((row // SIZE) % 2 == 1)[:, None]
    b_decay = tl.exp(
        tl.where(late, running_sum(b_gate, SIZE, False), until_end(next_gates, cell, SIZE))
    )
    b_kd = operand(b_k * b_decay, PRECISION)
    b_qd = operand(b_q * b_decay, PRECISION)
    b_early = tl.trans(b_kd)
    pair = late & (row[:, None] // SIZE == row[None, :] // SIZE + 1)
    b_kk = tl.dot(b_kd, b_early, input_precision=PRECISION)
    b_qk = tl.dot(b_qd, b_early, input_precision=PRECISION)
    return tl.where(pair, b_kk, 0.0), tl.where(pair, b_qk, 0.0)


@triton.jit(do_not_specialize=["tiles"])
def kda_pairs_kernel(
    y,
    gates,
    scales,
    chunks,
    mix,
    attend,
    tiles,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of one 16-row block against those before them: strips [16, 64] of mix and attend.

    attend[r, s] = q_r . (decay(s..r) k_s) for s <= r, else 0. mix holds, for s in earlier blocks,
    beta_r k_r . (decay(s..r) k_s), and on its diagonal blocks what solves them: (I + mix)^-1.
    """
    part = tl.program_id(0) % BLOCKS
    chunk = tl.program_id(0) // BLOCKS
    head = tl.program_id(1)
    tile = chunk.to(tl.int64) * HEADS + head
    row = tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_ROWS)
    own = part * BLOCK_ROWS + row
    strip = tile * CHUNK * CHUNK + own[:, None] * CHUNK + column[None, :]
    zeros = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    if part * BLOCK_ROWS >= tl.load(chunks + chunk * 4 + 1):  # no row here
        for other in range(0, BLOCKS):
            tl.store(mix + strip + other * BLOCK_ROWS, zeros)
            tl.store(attend + strip + other * BLOCK_ROWS, zeros)
        return

    tiles = tl.cast(tiles, tl.int64)
    q = y + tile * CHUNK * BLOCK
    k = q + tiles * CHUNK * BLOCK
    gates += tile * CHUNK * BLOCK
    q_scale = tl.load(scales + tile * CHUNK + own)[:, None]
    k_scales = scales + (tiles + tile) * CHUNK
    k_scale = tl.load(k_scales + own)[:, None]
    beta = tl.load(scales + (2 * tiles + tile) * CHUNK + own)[:, None]
    lane = tl.arange(0, COLS)
    cell = own[:, None] * BLOCK + lane[None, :]

    b_mix = zeros
    b_attend = zeros
    for begin in range(0, BLOCK, COLS):
        b_q = tl.load(q + begin + cell).to(tl.float32) * q_scale
        b_k = tl.load(k + begin + cell).to(tl.float32) * k_scale
        b_gate = tl.load(gates + begin + cell)
        b_attend += tl.where(row[:, None] == column[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
        for level in tl.static_range(4):
            b_kk, b_qk = pairs_of_halves(
                b_q, b_k, b_gate, gates + begin + BLOCK, cell, 1 << level, PRECISION
            )
            b_mix += b_kk
            b_attend += b_qk
    b_solved = inverse_of_unit_triangle(b_mix * beta)
    at = strip + part * BLOCK_ROWS
    tl.store(mix + at, b_solved)
    tl.store(attend + at, operand(b_attend, PRECISION))

    for other in range(0, part):
        early = row + other * BLOCK_ROWS
        early_scale = tl.load(k_scales + early)[:, None]
        early_cell = early[:, None] * BLOCK + lane[None, :]
        b_mix = zeros
        b_attend = zeros
        for begin in range(0, BLOCK, COLS):
            b_before = tl.exp(running_sum(tl.load(gates + begin + cell), BLOCK_ROWS, False))
            b_behind = until_end(gates + begin + BLOCK, early_cell, BLOCK_ROWS)
            for between in range(other + 1, part):
                b_gate = tl.load(
                    gates + begin + (row + between * BLOCK_ROWS)[:, None] * BLOCK + lane[None, :]
                )
                b_behind += tl.sum(b_gate, 0)[None, :]
            b_early = tl.load(k + begin + early_cell).to(tl.float32) * early_scale
            b_early = tl.trans(operand(b_early * tl.exp(b_behind), PRECISION))
            b_k = tl.load(k + begin + cell).to(tl.float32) * k_scale
            b_q = tl.load(q + begin + cell).to(tl.float32) * q_scale
            b_k = operand(b_k * b_before, PRECISION)
            b_q = operand(b_q * b_before, PRECISION)
            b_mix += tl.dot(b_k, b_early, input_precision=PRECISION)
            b_attend += tl.dot(b_q, b_early, input_precision=PRECISION)
        at = strip + other * BLOCK_ROWS
        tl.store(mix + at, b_mix * beta)
        tl.store(attend + at, operand(b_attend, PRECISION))
    for other in range(part + 1, BLOCKS):
        tl.store(attend + strip + other * BLOCK_ROWS, zeros)


@triton.jit
def solved(b_0, b_1, b_2, b_3, mix, EXACT: tl.constexpr):
    """The system (I + mix) x = b of 64 rows in four blocks of 16, by forward substitution."""
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_ROWS)[None, :]
    block = mix + row * CHUNK + column
    down: tl.constexpr = BLOCK_ROWS * CHUNK
    right: tl.constexpr = BLOCK_ROWS
    b_0 = tl.dot(tl.load(block), b_0, input_precision=EXACT)
    block += down
    b_1 -= tl.dot(tl.load(block), b_0, input_precision=EXACT)
    b_1 = tl.dot(tl.load(block + right), b_1, input_precision=EXACT)
    block += down
    b_2 -= tl.dot(tl.load(block), b_0, input_precision=EXACT)
    b_2 -= tl.dot(tl.load(block + right), b_1, input_precision=EXACT)
    b_2 = tl.dot(tl.load(block + 2 * right), b_2, input_precision=EXACT)
    block += down
    b_3 -= tl.dot(tl.load(block), b_0, input_precision=EXACT)
    b_3 -= tl.dot(tl.load(block + right), b_1, input_precision=EXACT)
    b_3 -= tl.dot(tl.load(block + 2 * right), b_2, input_precision=EXACT)
    b_3 = tl.dot(tl.load(block + 3 * right), b_3, input_precision=EXACT)
    return b_0, b_1, b_2, b_3


@triton.jit
def scaled_rows(x, cell, scales, at, BLOCK: tl.constexpr):
    """[16, C] float32: block `at` of a chunk, each row times its scale."""
    row = tl.arange(0, BLOCK_ROWS) + at * BLOCK_ROWS
    b_x = tl.load(x + at * BLOCK_ROWS * BLOCK + cell).to(tl.float32)
    return b_x * tl.load(scales + row)[:, None]


@triton.jit(do_not_specialize=["tiles"])
def kda_solve_kernel(
    y,
    gates,
    scales,
    mix,
    uw,
    q_old,
    k_end,
    keep,
    tiles,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Columns of one chunk, in terms of the state S before it: its update is u - w S.

    u = (I + mix)^-1 beta v and w = (I + mix)^-1 beta (k before) [64, BLOCK], by half the programs
    each. Those of w also write q_old = q before, k_end = (k after) transposed [BLOCK, 64] and
    keep [BLOCK], the decay over the chunk. before[r]: decay from the chunk's start through r;
    after[s]: decay behind s.
    """
    tile = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    keys = tl.program_id(2) // (BLOCK // COLS)
    row = tl.arange(0, BLOCK_ROWS)
    lane = tl.program_id(2) % (BLOCK // COLS) * COLS + tl.arange(0, COLS)
    cell = row[:, None] * BLOCK + lane[None, :]
    step: tl.constexpr = BLOCK_ROWS * BLOCK
    base = tile * CHUNK * BLOCK
    tiles = tl.cast(tiles, tl.int64)
    q = y + base
    k = q + tiles * CHUNK * BLOCK
    x = k + (1 - keys) * tiles * CHUNK * BLOCK
    q_scale = scales + tile * CHUNK
    k_scale = q_scale + tiles * CHUNK
    beta = k_scale + tiles * CHUNK
    gates += base

    b_passed = tl.zeros([COLS], tl.float32)
    for at in tl.static_range(4):
        b_rows = scaled_rows(x, cell, beta, at, BLOCK)
        if keys == 1:
            b_gate = tl.load(gates + at * step + cell)
            b_before = tl.exp(running_sum(b_gate, BLOCK_ROWS, False) + b_passed[None, :])
            b_passed += tl.sum(b_gate, 0)
            b_rows *= b_before * tl.load(k_scale + row + at * BLOCK_ROWS)[:, None]
            b_q = scaled_rows(q, cell, q_scale, at, BLOCK) * b_before
            tl.store(q_old + base + at * step + cell, operand(b_q, PRECISION))
        if at == 0:
            b_0 = b_rows
        elif at == 1:
            b_1 = b_rows
        elif at == 2:
            b_2 = b_rows
        else:
            b_3 = b_rows
    b_0, b_1, b_2, b_3 = solved(b_0, b_1, b_2, b_3, mix + tile * CHUNK * CHUNK, EXACT)
    uw += keys * tiles * CHUNK * BLOCK + base + cell
    if keys == 1:  # w is an operand later, u is not
        b_0 = operand(b_0, PRECISION)
        b_1 = operand(b_1, PRECISION)
        b_2 = operand(b_2, PRECISION)
        b_3 = operand(b_3, PRECISION)
    tl.store(uw, b_0)
    tl.store(uw + step, b_1)
    tl.store(uw + 2 * step, b_2)
    tl.store(uw + 3 * step, b_3)

    if keys == 1:
        tl.store(keep + tile * BLOCK + lane, tl.exp(b_passed))
        turned = base + lane[None, :] * CHUNK + row[:, None]
        b_behind = tl.zeros([COLS], tl.float32)
        for back in range(0, BLOCKS):
            here = BLOCKS - 1 - back
            b_after = until_end(gates + here * step + BLOCK, cell, BLOCK_ROWS) + b_behind[None, :]
            b_k = scaled_rows(k, cell, k_scale, here, BLOCK) * tl.exp(b_after)
            tl.store(k_end + turned + here * BLOCK_ROWS, operand(b_k, PRECISION))
            b_behind += tl.sum(tl.load(gates + here * step + cell), 0)


@triton.jit(do_not_specialize=["tiles"])
def kda_scan_kernel(
    uw,
    q_old,
    k_end,
    keep,
    attend,
    chunks,
    spans,
    state,
    out,
    tiles,
    state_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some columns of one head's state through the chunks of one span, results on the way.

    out = q_old S + attend (u - w S);  S <- keep S + k_end (u - w S).
    """
    span = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(spans + span * 3).to(tl.int64)
    first = tl.load(spans + span * 3 + 1)
    count = tl.load(spans + span * 3 + 2)
    tiles = tl.cast(tiles, tl.int64)
    row = tl.arange(0, CHUNK)
    key = tl.arange(0, BLOCK)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    state += slot * state_stride + head * DIM * DIM + key[:, None] * DIM + value[None, :]
    within = (key < DIM)[:, None] & (value < DIM)[None, :]
    b_state = tl.load(state, mask=within, other=0.0)
    tile = first.to(tl.int64) * HEADS + head
    chunks += first * 4
    for _ in range(0, count):
        base = tile * CHUNK * BLOCK
        by_row = base + row[:, None] * BLOCK
        b_w = tl.load(uw + tiles * CHUNK * BLOCK + by_row + key[None, :])
        b_update = tl.load(uw + by_row + value[None, :])
        b_before = operand(b_state, PRECISION)
        b_update -= tl.dot(b_w, b_before, input_precision=PRECISION)
        b_update = operand(b_update, PRECISION)
        b_q = tl.load(q_old + by_row + key[None, :])
        b_out = tl.dot(b_q, b_before, input_precision=PRECISION)
        b_attend = tl.load(
            attend + tile * CHUNK * CHUNK + row[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        )
        b_out = tl.dot(b_attend, b_update, b_out, input_precision=PRECISION)
        begin = tl.load(chunks).to(tl.int64)
        rows = tl.load(chunks + 1)
        tl.store(
            out + ((begin + row)[:, None] * HEADS + head) * DIM + value[None, :],
            b_out,
            mask=(row < rows)[:, None] & (value < DIM)[None, :],
        )
        b_k = tl.load(k_end + base + key[:, None] * CHUNK + row[None, :])
        b_state *= tl.load(keep + tile * BLOCK + key)[:, None]
        b_state = tl.dot(b_k, b_update, b_state, input_precision=PRECISION)
        tile += HEADS
        chunks += 4
    # Where a block is smaller than the program, several threads loaded what one of them stores.
    tl.debug_barrier()
    tl.store(state, b_state, mask=within)
