"""RMSNorm at K3's shapes."""

from typing import Any

import torch

from expertmesh.kernels.cases import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    PHASES,
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
    """x, gate and result of `itemsize`, the weight float32 and read once; the sigmoid counts four
    operations."""
    return Work(3 * itemsize * rows * width + 4 * width, 9 * rows * width)


def _rms_norm(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        return make.randn(rows, HIDDEN), make.randn(HIDDEN), EPS

    return Case("rms_norm", phase, f"{rows} rows", arguments, rms_norm_work(rows, HIDDEN, 2))


def _gated_rms_norm(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        # The gate is a slice of the product that all of a KDA layer's projections make together.
        gate_THD = make.randn(rows, 2 * HEADS * HEAD_DIM)[:, HEADS * HEAD_DIM :]
        x_THD, weight_D = (
            make.randn(rows, HEADS, HEAD_DIM),
            make.randn(HEAD_DIM, dtype=torch.float32),
        )
        return x_THD, weight_D, gate_THD.view(rows, HEADS, HEAD_DIM), EPS

    work = gated_rms_norm_work(rows * HEADS, HEAD_DIM, 2)
    return Case("gated_rms_norm", phase, f"{rows} rows", arguments, work)


CASES = [
    make_case(phase, rows) for make_case in (_rms_norm, _gated_rms_norm) for phase, rows in PHASES
]
