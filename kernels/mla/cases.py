"""Latent attention's decode step and the output gate at K3's shapes."""

from typing import Any

from expertmesh.kernels.cases import (
    DECODE_ROWS,
    HEAD_DIM,
    HEADS,
    LATENT_RANK,
    PREFILL_ROWS,
    ROPE_DIM,
    Case,
    Make,
    Phase,
)
from expertmesh.kernels.mla.types import PAGE
from expertmesh.kernels.work import Work

SCALE = (HEAD_DIM + ROPE_DIM) ** -0.5


def mla_decode_work(lengths: list[int], heads: int, rank: int, rope: int, itemsize: int) -> Work:
    """Every row's cache, both queries and the result once; the page table as int64. A score is
    rank + rope multiply-adds, a weighted latent rank; the softmax is not counted."""
    tokens, rows = sum(lengths), len(lengths)
    pages = sum(-(-length // PAGE) for length in lengths)
    moved = tokens * (rank + rope) + rows * heads * (2 * rank + rope)
    return Work(
        itemsize * moved + 8 * (pages + rows), 2 * heads * tokens * (2 * rank + rope), "bf16"
    )


def output_gate_work(rows: int, width: int, itemsize: int) -> Work:
    """Values and gate read, the result written once; the sigmoid counts four operations."""
    return Work(3 * rows * width * itemsize, 5 * rows * width)


def _mla_decode(rows: int, context: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        pages = context // PAGE
        # As the model passes them: heads first from the absorbing matmul, a slice of q.
        q_latent = make.randn(HEADS, rows, LATENT_RANK).transpose(0, 1)
        q_rope = make.randn(rows, HEADS, HEAD_DIM + ROPE_DIM)[:, :, HEAD_DIM:]
        cache = make.randn(rows * pages * PAGE, LATENT_RANK + ROPE_DIM)
        table = make.of(list(range(rows * pages))).view(pages, rows).t().contiguous()
        # All indices of a step come in one array: the lengths' address is that of 8 bytes at least.
        lengths = make.of([0] * 3 * rows + [context] * rows)[3 * rows :]
        return q_latent, q_rope, cache, table, lengths, SCALE

    work = mla_decode_work([context] * rows, HEADS, LATENT_RANK, ROPE_DIM, 2)
    return Case("mla_decode", "decode", f"{rows} rows, {context} tokens", arguments, work)


def _output_gate(phase: Phase, rows: int) -> Case:
    width = HEADS * HEAD_DIM

    def arguments(make: Make) -> tuple[Any, ...]:
        return make.randn(rows, width), make.randn(rows, 2 * width)[:, width:]

    return Case("output_gate", phase, f"{rows} rows", arguments, output_gate_work(rows, width, 2))


CASES = [
    _mla_decode(DECODE_ROWS, 1024),
    _mla_decode(DECODE_ROWS, 8192),
    _mla_decode(1, 131_072),
    _output_gate("decode", DECODE_ROWS),
    _output_gate("prefill", PREFILL_ROWS),
]
