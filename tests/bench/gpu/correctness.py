"""Every Triton operator against float64, at K3's shapes and at sizes that no block divides.

Of the operators that torch serves on a GPU, those with sizes in `inputs.ODD` are held against it
too: they were written where there was none.
"""

from collections.abc import Callable
from typing import Any

import torch

from expertmesh.kernels.cases import Make
from expertmesh.kernels.registry import OPERATORS
from tests.bench.gpu.inputs import ODD, DeviceMake
from tests.bench.gpu.operators import (
    cases,
    claims,
    formula,
    implementation,
    kept,
    poisoned,
    same_bits,
    tensors,
)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ODD_PREFIX = "odd: "


def odd_items(small: bool = False) -> list[str]:
    """small: one of each operator."""
    return [
        f"{ODD_PREFIX}{operator}/{label}/{dtype}"
        for operator, builders in ODD.items()
        for label in list(builders)[: 1 if small else None]
        for dtype in list(DTYPES)[: 1 if small else None]
    ]


def without_odd_sizes() -> list[str]:
    """Operators with a Triton kernel that are checked at K3's shapes alone."""
    return sorted({case.operator for case in cases().values()} - ODD.keys())


def check(item: str, device: torch.device, repeats: int) -> dict[str, Any]:
    """One call with fresh random inputs and poisoned outputs; at K3's shapes `repeats` more, which
    must give the same bits: where programs race, large sizes show it.

    Raises AssertionError with all numbers where a claim does not hold.
    """
    if item.startswith(ODD_PREFIX):
        operator, label, dtype = item.removeprefix(ODD_PREFIX).split("/")
        return _check(operator, lambda make: ODD[operator][label](make, DTYPES[dtype]), device)
    case = cases()[item]
    return _check(case.operator, case.arguments, device, repeats)


def _check(
    operator: str, arguments: Callable[[Make], Any], device: torch.device, repeats: int = 0
) -> dict[str, Any]:
    args = arguments(DeviceMake(device, seed=20))
    before = kept(operator, args)
    backend = "torch" if OPERATORS[operator].without_triton else "triton"
    kernel = implementation(operator, backend)
    with poisoned():
        result = kernel(*args)
        for _ in range(repeats):
            again = kept(operator, before)
            others = tensors((kernel(*again), again))
            for one, other in zip(tensors((result, args)), others, strict=True):
                assert same_bits(one, other), f"{operator}: two calls, two results"
    judged = {one.name: one.judge() for one in claims(operator, before, result, args)}
    against = "float64" if formula(operator) else "the torch twin"
    assert all(found["holds"] for found in judged.values()), f"{operator}: {judged}"
    return {"against": against, "claims": judged}
