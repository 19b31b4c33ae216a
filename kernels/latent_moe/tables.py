"""Where the experts of a layer lie in device memory, as one table that a kernel can read.

The experts of a layer are separate tensors that come and go one by one; a kernel finds them by
their addresses.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Mxfp4 = tuple[Tensor, Tensor]
Matrix = Tensor | Mxfp4
Matrices = tuple[Matrix, Matrix, Matrix]
"""w1 = gate [I, D], w2 = down [D, I], w3 = up [I, D]: dense, or (codes uint8 [N, K/2], scale uint8
[N, K/32]) as kernels/quant packs them. All three of one expert in one form."""

MXFP4, BFLOAT16, FLOAT32 = 1, 2, 3  # forms
_DENSE = {torch.bfloat16: BFLOAT16, torch.float32: FLOAT32}
COLUMNS = 7


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """The experts that a process holds of one layer.

    slots_E: int32 [experts of the model], the row of an expert in `rows`, -1 where it is not held.
    rows: int64 [held, 7]: form, then the addresses of codes and scales of w1, w3, w2 (a dense
    matrix has no scale address). forms: those that occur, ascending. inner: I.
    tensors: what the addresses point to. Whoever holds the table keeps that memory from being
    freed; a table is never changed, experts that come or go make a new one.
    """

    slots_E: Tensor
    rows: Tensor
    forms: tuple[int, ...]
    inner: int
    tensors: tuple[Tensor, ...]

    @property
    def held(self) -> int:
        return self.rows.shape[0]


def expert_table(
    held: Mapping[int, Matrices], experts: int, inner: int, device: torch.device | str
) -> ExpertTable:
    """The table of the experts `held` (id -> matrices, on `device`) of a layer with `experts`.

    Raises ValueError for a matrix that a kernel can not read where it lies: one that is not dense
    in memory row by row, that begins off a 16-byte boundary, of another type or size.
    """
    width: int | None = None
    slots = [-1] * experts
    rows: list[list[int]] = []
    tensors: list[Tensor] = []
    for expert, (w1, w2, w3) in held.items():
        forms = {_form(matrix) for matrix in (w1, w2, w3)}
        if len(forms) != 1:
            raise ValueError(f"expert {expert}: its matrices are stored in different ways")
        row = [*forms]
        for matrix in (w1, w3, w2):
            parts = matrix if isinstance(matrix, tuple) else (matrix,)
            addresses = [_address(part, expert) for part in parts]
            row += [*addresses, 0][:2]
            tensors += parts
        sizes = _size(w1), _size(w3), _size(w2)
        width = sizes[0][1] if width is None else width
        if sizes != ((inner, width), (inner, width), (width, inner)):
            raise ValueError(f"expert {expert}: w1, w3, w2 of {sizes}")
        slots[expert] = len(rows)
        rows.append(row)
    return ExpertTable(
        torch.tensor(slots, dtype=torch.int32).to(device),
        torch.tensor(rows, dtype=torch.int64).reshape(-1, COLUMNS).to(device),
        tuple(sorted({row[0] for row in rows})),
        inner,
        tuple(tensors),
    )


def _form(matrix: Matrix) -> int:
    if isinstance(matrix, tuple):
        return MXFP4
    if matrix.dtype not in _DENSE:
        raise ValueError(f"no kernel reads experts of {matrix.dtype}")
    return _DENSE[matrix.dtype]


def _size(matrix: Matrix) -> tuple[int, int]:
    """Rows and columns in numbers; (0, 0) where codes and scales do not belong together."""
    if isinstance(matrix, Tensor):
        return matrix.shape[0], matrix.shape[1]
    codes, scales = matrix
    rows, groups = scales.shape
    return (rows, 32 * groups) if codes.shape == (rows, 16 * groups) else (0, 0)


def _address(part: Tensor, expert: int) -> int:
    if not part.is_contiguous():
        raise ValueError(f"expert {expert}: a matrix is not dense row by row")
    if part.device.type == "meta":
        return 0
    address = part.data_ptr()
    if address % 16:
        raise ValueError(f"expert {expert}: a matrix does not begin on a 16-byte boundary")
    return address
