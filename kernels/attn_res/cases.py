"""Attention Residuals at K3's shapes."""

from typing import Any

import torch

from expertmesh.kernels.cases import (
    ATTN_RES_SOURCES,
    HIDDEN,
    PHASES,
    Case,
    Make,
    Phase,
)
from expertmesh.kernels.work import Work


def attn_res_mix_work(sources: int, rows: int, width: int, itemsize: int) -> Work:
    """Sources read and the mix written once, the score weights (float32) once. Per source and
    element a square, a score product and a weighted sum: six operations."""
    bytes_moved = itemsize * (sources + 1) * rows * width + 4 * width
    return Work(bytes_moved, 6 * sources * rows * width)


def attn_res_mix_norm_work(
    sources: int, rows: int, width: int, itemsize: int, norm_itemsize: int
) -> Work:
    """The mix, with the norm's weights read once and four more operations per result."""
    mix = attn_res_mix_work(sources, rows, width, itemsize)
    return Work(mix.bytes + norm_itemsize * width, mix.flops + 4 * rows * width)


def _sources(make: Make, rows: int) -> tuple[Any, ...]:
    sources_NTH = make.randn(ATTN_RES_SOURCES, rows, HIDDEN)
    return sources_NTH, make.randn(HIDDEN, dtype=torch.float32, scale=HIDDEN**-0.5)


def _mix(phase: Phase, rows: int) -> Case:
    work = attn_res_mix_work(ATTN_RES_SOURCES, rows, HIDDEN, 2)
    return Case("attn_res_mix", phase, _size(rows), lambda make: _sources(make, rows), work)


def _mix_norm(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        return *_sources(make, rows), make.randn(HIDDEN)

    work = attn_res_mix_norm_work(ATTN_RES_SOURCES, rows, HIDDEN, 2, 2)
    return Case("attn_res_mix_norm", phase, _size(rows), arguments, work)


def _size(rows: int) -> str:
    return f"{rows} rows, {ATTN_RES_SOURCES} sources"


CASES = [make_case(phase, rows) for make_case in (_mix, _mix_norm) for phase, rows in PHASES]
