"""Plain records of the MLA operator."""

import sys
from typing import NamedTuple

from torch import Tensor

PAGE = 64  # tokens per cache page
NO_TAIL = sys.maxsize


class MlaSpan(NamedTuple):
    """Rows [row_begin, row_end) of a packed batch: queries at positions position, position + 1, ...

    `pages` int64 [n] lists the pages of the sequence in order; the keys of the span itself are
    already written. tail: a multiple of 64; queries at this position and behind it are computed in
    the absorbed form. It has to follow from the prompt alone: the two forms differ in their bits.
    """

    row_begin: int
    row_end: int
    position: int
    pages: Tensor
    tail: int = NO_TAIL
