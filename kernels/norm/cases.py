"""RMSNorm at K3's shapes."""

from typing import Any

import torch

from expertmesh.kernels.cases import (
    DECODE_ROWS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    PREFILL_ROWS,
    Case,
    Make,
    Phase,
)
from expertmesh.kernels.work import Work

EPS = 1e-5


def rms_norm_work(rows: int, width: int, itemsize: int) -> Work:
    """x read and y written once, the weight once; a square, a sum, two products per element."""
    return Work(itemsize * (2 * rows * width + width), 4 * rows * width)


def gated_rms_norm_work(rows: int, width: int, itemsize: int) -> Work:
    """x float32, gate and result of `itemsize`; the sigmoid counts four operations."""
    return Work(rows * width * (4 + 2 * itemsize) + 4 * width, 9 * rows * width)


def _rms_norm(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        return make.randn(rows, HIDDEN), make.randn(HIDDEN), EPS

    return Case("rms_norm", phase, f"{rows} rows", arguments, rms_norm_work(rows, HIDDEN, 2))


def _gated_rms_norm(phase: Phase, rows: int) -> Case:
    shape = rows, HEADS, HEAD_DIM

    def arguments(make: Make) -> tuple[Any, ...]:
        weight_D = make.randn(HEAD_DIM, dtype=torch.float32)
        return make.randn(*shape, dtype=torch.float32), weight_D, make.randn(*shape), EPS

    work = gated_rms_norm_work(rows * HEADS, HEAD_DIM, 2)
    return Case("gated_rms_norm", phase, f"{rows} rows", arguments, work)


CASES = [
    make_case(phase, rows)
    for make_case in (_rms_norm, _gated_rms_norm)
    for phase, rows in (("decode", DECODE_ROWS), ("prefill", PREFILL_ROWS))
]
