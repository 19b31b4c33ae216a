"""Router, gated activation and experts at K3's shapes.

An expert actor of 64 holds 14 of 896 experts, and spare copies beside them: 15 here. The rows that
reach it are those with an expert there, and few of them have two.
"""

import random
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cases import (
    DECODE_ROWS,
    EXPERTS,
    INNER,
    LATENT,
    PREFILL_ROWS,
    TOP_K,
    Case,
    Make,
    Phase,
)
from expertmesh.kernels.latent_moe.tables import ExpertTable, Matrices, Matrix, expert_table
from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.quant.torch_ops import mxfp4_decode
from expertmesh.kernels.work import Unit, Work

SITU = Glu("situ", 4.0, 25.0)
SHARED_INNER = 2 * INNER
HELD = tuple(range(7, EXPERTS, 60))  # 15 experts
SECOND = 0.12  # share of the rows with a second expert here


def route_work(rows: int, experts: int, top_k: int) -> Work:
    """Logits and bias read, ids and weights written, once; per score the sigmoid counts four
    operations, the bias one, and one comparison for each of the top k."""
    return Work(4 * (rows + 1) * experts + 12 * rows * top_k, rows * experts * (5 + top_k))


def glu_work(rows: int, half: int, itemsize: int) -> Work:
    """Gate, up and result once; two tanh and a sigmoid count four operations each, products one."""
    return Work(3 * itemsize * rows * half, 17 * rows * half)


def experts_work(
    rows: int,
    top_k: int,
    pairs: int,
    hit: int,
    itemsize: int,
    weight_bytes: float,
    unit: Unit,
) -> Work:
    """Rows, ids and weights read, float32 sums written, and the three matrices of the `hit` experts
    read, once, `weight_bytes` per number; three products for each pair of a row and an expert.

    Hidden values and terms are counted nowhere: a kernel that keeps them on the chip is thinkable.
    """
    moved = rows * (LATENT * (itemsize + 4) + 12 * top_k)
    weights = int(hit * 3 * LATENT * INNER * weight_bytes)
    return Work(moved + weights, 2 * pairs * 3 * LATENT * INNER, unit)


class CaseExperts:
    """As an expert bank passes them: 15 experts with random matrices, each in memory of its own.

    Those of one are those of the last, moved on by a row: drawing all would take a minute.
    """

    def __init__(self, make: Make, packed: bool) -> None:
        drawn = _packed if packed else _dense
        shapes = (INNER, LATENT), (LATENT, INNER), (INNER, LATENT)
        w1, w2, w3 = (drawn(make, *shape) for shape in shapes)
        self._held: dict[int, Matrices] = {
            expert: (_moved(w1, at), _moved(w2, at), _moved(w3, at))
            for at, expert in enumerate(HELD)
        }
        self._device = make.device

    @cached_property
    def _table(self) -> ExpertTable:
        return expert_table(self._held, EXPERTS, INNER, self._device)

    def table(self) -> ExpertTable:
        return self._table

    def __call__(self, expert: int) -> tuple[Tensor, Tensor]:
        w1, w2, w3 = (
            mxfp4_decode(*one, torch.bfloat16) if isinstance(one, tuple) else one
            for one in self._held[expert]
        )
        return torch.cat([w1, w3]), w2


def _packed(make: Make, rows: int, columns: int) -> Matrix:
    codes = make.ints(256, rows, columns // 2, dtype=torch.uint8)
    return codes, make.ints(3, rows, columns // 32, dtype=torch.uint8).add_(118)


def _dense(make: Make, rows: int, columns: int) -> Matrix:
    return make.randn(rows, columns, scale=columns**-0.5)


def _moved(matrix: Matrix, rows: int) -> Matrix:
    if isinstance(matrix, tuple):
        return matrix[0].roll(rows, 0), matrix[1].roll(rows, 0)
    return matrix.roll(rows, 0)


@cache
def chosen_ids(rows: int) -> list[list[int]]:
    """[rows, TOP_K]: one or two experts of HELD at random places, -1 elsewhere."""
    draw = random.Random(rows)
    found = []
    for _ in range(rows):
        ids = [-1] * TOP_K
        count = 2 if draw.random() < SECOND else 1
        for place, expert in zip(
            draw.sample(range(TOP_K), count), draw.sample(HELD, count), strict=True
        ):
            ids[place] = expert
        found.append(ids)
    return found


def _route(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        logits_TE = make.randn(rows, EXPERTS, dtype=torch.float32)
        return logits_TE, make.randn(EXPERTS, dtype=torch.float32, scale=0.1), TOP_K, True, 1.0

    return Case("route", phase, f"{rows} rows", arguments, route_work(rows, EXPERTS, TOP_K))


def _glu(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        return make.randn(rows, 2 * SHARED_INNER), SITU

    return Case("glu", phase, f"{rows} rows", arguments, glu_work(rows, SHARED_INNER, 2))


def _experts(packed: bool, dtype: torch.dtype) -> Callable[[Phase, int], Case]:
    def make_case(phase: Phase, rows: int) -> Case:
        ids = chosen_ids(rows)
        hit = {expert for row in ids for expert in row if expert >= 0}
        pairs = sum(expert >= 0 for row in ids for expert in row)

        def arguments(make: Make) -> tuple[Any, ...]:
            return (
                make.randn(rows, LATENT, dtype=dtype),
                make.of(ids),
                make.randn(rows, TOP_K, dtype=torch.float32),
                CaseExperts(make, packed),
                SITU,
            )

        weight_bytes = 1 / 2 + 1 / 32 if packed else 2.0
        unit: Unit = "bf16" if dtype == torch.bfloat16 else "tf32"
        work = experts_work(rows, TOP_K, pairs, len(hit), dtype.itemsize, weight_bytes, unit)
        stored = "mxfp4" if packed else "bf16"
        size = f"{rows} rows, {stored} experts, {str(dtype).removeprefix('torch.')}"
        return Case("experts_partial_sum", phase, size, arguments, work)

    return make_case


_PHASES: tuple[tuple[Phase, int], ...] = (("decode", DECODE_ROWS), ("prefill", PREFILL_ROWS))

CASES = [
    make_case(phase, rows)
    for make_case in (
        _route,
        _glu,
        _experts(packed=True, dtype=torch.bfloat16),
        _experts(packed=False, dtype=torch.bfloat16),
        # Packed weights for other than bf16 rows: unpacked in the kernel, as in the interpreter.
        _experts(packed=True, dtype=torch.float32),
    )
    for phase, rows in _PHASES
]
