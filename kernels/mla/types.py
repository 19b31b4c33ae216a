"""Plain records of the MLA operator."""

from typing import NamedTuple

from torch import Tensor

PAGE = 64  # tokens per cache page


class MlaSpan(NamedTuple):
    """Rows [row_begin, row_end) of a packed batch: queries at positions position, position + 1, ...

    `pages` int64 [n] lists the pages of the sequence in order; the keys of the span itself are
    already written.
    """

    row_begin: int
    row_end: int
    position: int
    pages: Tensor
