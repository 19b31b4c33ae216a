"""Quantised weights and rows at K3's shapes."""

from typing import Any

import torch

from expertmesh.kernels.cases import INNER, LATENT, PHASES, Case, Make, Phase
from expertmesh.kernels.quant.torch_ops import BLOCK
from expertmesh.kernels.work import Work


def mxfp4_decode_work(values: int, itemsize: int) -> Work:
    """Half a byte of code per value and a byte of scale per block read, values written; a product
    per value (what builds it from its bits is integer work)."""
    return Work(values // 2 + values // BLOCK + itemsize * values, values)


def fp8_encode_work(rows: int, width: int, itemsize: int) -> Work:
    """Rows read, a byte per value and a float32 scale per row written; magnitude, maximum, quotient
    and cast per value."""
    return Work(rows * (width * (itemsize + 1) + 4), 4 * rows * width)


def fp8_decode_work(rows: int, width: int, itemsize: int) -> Work:
    """A byte per value and a scale per row read, values written; a cast, a product, a cast."""
    return Work(rows * (width * (itemsize + 1) + 4), 3 * rows * width)


def _mxfp4_decode() -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        packed = make.ints(256, INNER, LATENT // 2, dtype=torch.uint8)
        scale = make.ints(255, INNER, LATENT // BLOCK, dtype=torch.uint8)
        return packed, scale, torch.bfloat16

    work = mxfp4_decode_work(INNER * LATENT, 2)
    return Case("mxfp4_decode", "prefill", "one matrix of an expert", arguments, work)


def _fp8_encode(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        return (make.randn(rows, LATENT),)

    return Case("fp8_encode", phase, f"{rows} rows", arguments, fp8_encode_work(rows, LATENT, 2))


def _fp8_decode(phase: Phase, rows: int) -> Case:
    def arguments(make: Make) -> tuple[Any, ...]:
        codes_TD = make.ints(127, rows, LATENT, dtype=torch.uint8)
        return codes_TD, make.randn(rows, 1, dtype=torch.float32), torch.bfloat16

    return Case("fp8_decode", phase, f"{rows} rows", arguments, fp8_decode_work(rows, LATENT, 2))


CASES = [
    _mxfp4_decode(),
    *(make_case(phase, rows) for make_case in (_fp8_encode, _fp8_decode) for phase, rows in PHASES),
]
