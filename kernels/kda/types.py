"""Plain records of the KDA operator."""

from typing import NamedTuple

CHUNK = 64  # tokens per chunk; chunks are cut at absolute multiples of it


class KdaSpan(NamedTuple):
    """Rows [row_begin, row_end) of a packed batch that continue the sequence in `slot`.

    `position` is the absolute position of the first row.
    """

    slot: int
    row_begin: int
    row_end: int
    position: int
