"""Float32 products with matrices kept in float16: half the memory traffic, the same numbers.

bf16 and mxfp4 weights are exact in float16 once the matrix is shifted by a power of two. FBGEMM
widens them on the way into the registers and never packs them again. Measured on one AVX2 core,
float32 by MKL / oneDNN against this: 2048 x 1024, 4 rows 637 / 433 against 173 us, 512 rows 23 / 28
against 22 ms; 192 x 96, 4 rows 6.2 / 32 against 4.2 us.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.kernels.elementwise import constant

# How FBGEMM deals rows to its kernels repeats after so many; larger batches go in such pieces.
PERIOD = 120


class HalfMatrix:
    """W [N, K]. Multiplies contiguous or strided rows, in float32; bfloat16 rows give such."""

    __slots__ = ("_packed", "_spread", "_unshift", "shape")

    def __init__(self, shifted_NK: Tensor, shift: int, spread: bool) -> None:
        """shifted_NK: W * 2^shift, exact in float16. spread: products go to all of torch's threads,
        for 16 us more a call; `into` is not to be had then."""
        self.shape = shifted_NK.shape
        self._spread: Any = None
        if spread:
            prepack = torch.ops.quantized.linear_prepack_fp16
            self._spread = prepack(shifted_NK.contiguous(), None)
        else:
            self._packed = torch.fbgemm_pack_gemm_matrix_fp16(shifted_NK.contiguous())
        self._unshift = constant(2.0**-shift) if shift else None

    @property
    def nbytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]

    def __call__(self, x_TK: Tensor) -> Tensor:
        """x Wᵀ [T, N]; a row's bits do not depend on the others."""
        if x_TK.dtype != torch.float32:
            return self(x_TK.float()).to(x_TK.dtype)
        rows = x_TK.shape[0]
        missing = full_rows(rows) - rows
        if missing:
            x_TK = F.pad(x_TK, (0, 0, 0, missing))
        if self._spread is not None:
            out_TN: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x_TK, self._spread)
        else:
            out_TN = torch.fbgemm_linear_fp16_weight_fp32_activation(x_TK, self._packed, None)
        if self._unshift is not None:
            out_TN.mul_(self._unshift)
        return out_TN[:rows] if missing else out_TN

    def into(self, x_TK: Tensor, out_TN: Tensor) -> None:
        """Writes x Wᵀ to a contiguous `out_TN`, both float32. T is one of `full_rows`."""
        torch.fbgemm_linear_fp16_weight_fp32_activation(x_TK, self._packed, None, out_TN)
        if self._unshift is not None:
            out_TN.mul_(self._unshift)

    def dense(self) -> Tensor:
        """W [N, K] as the product reads it, from its packed memory: float32, zeros positive."""
        return self(torch.eye(self.shape[1])).t()


def to_half(weight_NK: Tensor, spread: bool = False) -> HalfMatrix | None:
    """None where the product is not to be had, or the weight is not exact in float16."""
    if weight_NK.device.type != "cpu" or not weight_NK.numel() or not available():
        return None
    if weight_NK.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight_NK.dtype == torch.bfloat16 and native_bf16():
        return None
    weight_NK = weight_NK.float()
    peak = weight_NK.abs().max()
    if not torch.isfinite(peak):
        return None
    if torch.equal(weight_NK.half().float(), weight_NK):
        return HalfMatrix(weight_NK, 0, spread)
    shift = 15 - int(torch.frexp(peak).exponent)  # the largest below 2^15, far from overflow
    if abs(shift) > 100:
        return None
    shifted_NK = weight_NK * 2.0**shift
    exact = torch.equal(shifted_NK.half().float(), shifted_NK)
    return HalfMatrix(shifted_NK, shift, spread) if exact else None


def native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16. Without, torch takes 38 ms for 2048 x 1024 and 4 rows,
    two hundred times as long as in float16 weights."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def available() -> bool:
    """Whether this build of torch has the product, and with bits that do not depend on the rows'
    companions."""
    return bool(_table())


@lru_cache(1 << 12)
def full_rows(rows: int) -> int:
    """The next number of rows, `rows` or a few more, of which all are computed alike.

    With one or two rows FBGEMM sums in another order than with three or more, and it cuts some
    numbers of rows so that one or two are left.
    """
    whole, rest = divmod(rows, PERIOD)
    return whole * PERIOD + _table()[rest]


def full_row_counts(rows_E: np.ndarray) -> np.ndarray:
    """`full_rows` of each."""
    rest_E = rows_E % PERIOD
    full_E: np.ndarray = rows_E - rest_E + np.take(_table(), rest_E)
    return full_E


@cache
def _table() -> tuple[int, ...]:
    """rows below PERIOD -> `full_rows`; empty where nothing can be relied on. Found by trying: how
    rows are dealt depends on the processor."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.no_grad(), _quiet():
        weight = torch.randn(64, 61, generator=generator).half().float()
        x = torch.randn(1, 61, generator=generator).expand(3 * PERIOD, -1).contiguous()
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
            product = torch.fbgemm_linear_fp16_weight_fp32_activation
            row = product(x, packed, None)[0]
            alike = [
                bool((product(x[:rows], packed, None) == row).all())
                for rows in range(1, 3 * PERIOD + 1)
            ]
        except (AttributeError, TypeError, RuntimeError):  # removed, changed, not for this CPU
            return ()
    if alike != alike[:PERIOD] * 3 or not alike[PERIOD - 1]:
        return ()
    table = [PERIOD]
    for rows in range(PERIOD - 1, 0, -1):
        table.append(rows if alike[rows - 1] else table[-1])
    return (0, *reversed(table[1:]))


@contextmanager
def _quiet() -> Iterator[None]:
    """torch announces, once in a process, that it may drop these functions one day: `available`
    then says no."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fbgemm.* is deprecated")
        yield
