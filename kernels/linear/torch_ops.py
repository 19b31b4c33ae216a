"""Linear with the weight laid out once, at load, the way its matmul reads it.

On a CPU, weights that float16 can hold are kept in it (half.py). For all others: at decode
sizes (4 to 16 rows) the BLAS packs the weight anew on every call, which costs more than the
product. Measured on 2048 x 1024 fp32, 4 rows: 0.78 ms as stored, 0.38 ms prepacked by oneDNN; on
512 x 256: 0.10 against 0.06 ms with the transpose kept contiguous. oneDNN has a fixed cost of about
25 us a call, so small weights take the transpose.

All give a row the same bits for any number of rows from 4 up.
"""

import torch
from torch import Tensor

from expertmesh.kernels.linear.half import native_bf16, to_half

PREPACK_ELEMENTS = 1 << 18
# A matmul with 1 row, or with 2 or 3, uses other CPU kernels than one with 4 or more, and their
# last bits differ. From 4 rows up, a row's result does not depend on how many others there are.
MIN_ROWS = 4
# A contiguous transpose of another width makes the last bits of a row depend on the batch.
_TRANSPOSE_MULTIPLE = 16


def lay_out(weight_NK: Tensor) -> Tensor:
    """The same matrix [N, K] with its transpose contiguous where that is faster and exact."""
    if weight_NK.shape[0] % _TRANSPOSE_MULTIPLE:
        return weight_NK.contiguous()
    return weight_NK.t().contiguous().t()


class PackedLinear:
    """x_TK -> x Wᵀ [T, N], in x's dtype (the weight's)."""

    __slots__ = ("_half", "_packed", "_weight_KN", "width")

    def __init__(self, weight_NK: Tensor) -> None:
        self.width = weight_NK.shape[0]
        self._packed: Tensor | None = None
        self._weight_KN: Tensor | None = None
        spread = weight_NK.numel() >= PREPACK_ELEMENTS and torch.get_num_threads() > 1
        self._half = to_half(weight_NK, spread)
        if self._half is not None:
            return
        if _worth_prepacking(weight_NK):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), MIN_ROWS)
        else:
            self._weight_KN = lay_out(weight_NK).t()

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self._half is not None:
            return self._half(x_TK)
        if self._weight_KN is not None:
            return torch.mm(x_TK, self._weight_KN)
        return torch.ops.mkldnn._linear_pointwise(x_TK, self._packed, None, "none", [], "")


def pack_linear(weight_NK: Tensor) -> PackedLinear:
    """Lays `weight_NK` out for repeated products; the original is not kept."""
    return PackedLinear(weight_NK)


def _worth_prepacking(weight_NK: Tensor) -> bool:
    return (
        weight_NK.device.type == "cpu"
        and weight_NK.numel() >= PREPACK_ELEMENTS
        and torch.backends.mkldnn.is_available()
        and (weight_NK.dtype != torch.bfloat16 or native_bf16())
    )
