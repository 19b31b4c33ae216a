"""KDA at K3's shapes."""

from typing import Any

import torch

from expertmesh.kernels.cases import DECODE_ROWS, HEAD_DIM, HEADS, PREFILL_ROWS, Case, Make
from expertmesh.kernels.kda.types import CHUNK
from expertmesh.kernels.launch import blocks
from expertmesh.kernels.work import Work

TAPS = 4
GATE_BOUND = -5.0
CHANNELS = 3 * HEADS * HEAD_DIM


def kda_decode_work(rows: int, heads: int, dim: int, taps: int, itemsize: int) -> Work:
    """State and window read and written once, projections and weights read, the result written.

    Counted per state element: decay, prediction, update and read-out (seven); per channel of q, k
    and v: the convolution and ten for what follows; per gate channel: ten.
    """
    channels = 3 * heads * dim
    state = 2 * 4 * rows * heads * dim * dim
    window = 2 * (taps - 1) * itemsize * rows * channels
    projected = itemsize * rows * (channels + heads * dim + heads)
    constants = 4 * (taps * channels + heads + heads * dim)
    moved = state + window + projected + constants + 4 * rows * heads * dim + 8 * rows
    flops = 7 * rows * heads * dim * dim + rows * channels * (2 * taps + 10)
    return Work(moved, flops + 10 * rows * heads * dim)


def kda_prefill_work(
    rows: int, sequences: int, heads: int, dim: int, taps: int, itemsize: int
) -> Work:
    """Projections and weights read, state and window of each sequence read and written, results
    written; nothing in between.

    Counted are the chunked form's products on tensor cores (TF32: the state's precision), per chunk
    of 64 rows and head: the two triangles of products within the chunk, the triangular system for
    2 D right-hand sides, and with the state w S, q S, attend U and k^T U.
    """
    channels = 3 * heads * dim
    state = 2 * 4 * sequences * heads * dim * dim
    window = 2 * (taps - 1) * itemsize * sequences * channels
    projected = itemsize * rows * (channels + heads * dim + heads)
    constants = 4 * (taps * channels + heads + heads * dim)
    moved = state + window + projected + constants + 4 * rows * heads * dim
    triangle = CHUNK * CHUNK * dim  # half of the products, two operations each
    per_chunk = 2 * triangle + 2 * triangle + 3 * 2 * CHUNK * dim * dim + triangle
    return Work(moved, blocks(rows, CHUNK) * heads * per_chunk, "tf32")


def _constants(make: Make, slots: int) -> tuple[Any, ...]:
    """From the convolution's weight to the state."""
    return (
        make.randn(TAPS, CHANNELS, dtype=torch.float32, scale=0.5).t(),
        make.randn(HEADS, dtype=torch.float32),
        make.randn(HEADS, HEAD_DIM, dtype=torch.float32),
        GATE_BOUND,
        make.randn(slots, TAPS - 1, CHANNELS),
        make.randn(slots, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32, scale=0.1),
    )


def _projected(make: Make, rows: int) -> tuple[Any, ...]:
    return (
        make.randn(rows, CHANNELS),
        make.randn(rows, HEADS, HEAD_DIM),
        make.randn(rows, HEADS),
    )


def _decode(make: Make) -> tuple[Any, ...]:
    slots = make.of(list(range(DECODE_ROWS)))
    return *_projected(make, DECODE_ROWS), *_constants(make, DECODE_ROWS), slots


def _prefill(make: Make) -> tuple[Any, ...]:
    spans = [(0, 0, PREFILL_ROWS, 0)]
    return *_projected(make, PREFILL_ROWS), *_constants(make, 1), spans


CASES = [
    Case(
        "kda_decode",
        "decode",
        f"{DECODE_ROWS} rows",
        _decode,
        kda_decode_work(DECODE_ROWS, HEADS, HEAD_DIM, TAPS, 2),
    ),
    Case(
        "kda_prefill",
        "prefill",
        f"{PREFILL_ROWS} rows",
        _prefill,
        kda_prefill_work(PREFILL_ROWS, 1, HEADS, HEAD_DIM, TAPS, 2),
    ),
]
