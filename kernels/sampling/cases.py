"""Sampling at K3's vocabulary."""

from typing import Any

import torch

from expertmesh.kernels.cases import DECODE_ROWS, VOCABULARY, Case, Make
from expertmesh.kernels.work import Work


def sample_work(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Every logit read once, five settings and a result per row. A difference, a product, an
    exponential (four operations) and a sum per logit: a draw without filters."""
    return Work(rows * (vocabulary * itemsize + 36), 7 * rows * vocabulary)


def _sample(size: str, top_k: int, top_p: float) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        rows = [1.0] * DECODE_ROWS
        uniform = [(row + 0.5) / DECODE_ROWS for row in range(DECODE_ROWS)]
        return (
            make.randn(DECODE_ROWS, VOCABULARY, dtype=torch.float32, scale=3.0),
            make.of(rows, torch.float32),
            make.of([top_k] * DECODE_ROWS),
            make.of([top_p] * DECODE_ROWS, torch.float32),
            make.of([0.0] * DECODE_ROWS, torch.float32),
            make.of(uniform, torch.float64),
        )

    work = sample_work(DECODE_ROWS, VOCABULARY, 4)
    return Case("sample", "decode", f"{DECODE_ROWS} rows, {size}", arguments, work)


CASES = [_sample("no filter", -1, 1.0), _sample("top_k 50, top_p 0.9", 50, 0.9)]
