"""How often names were seen lately, in a fixed amount of memory (TinyLFU's sketch)."""

import struct

import numpy as np

from expertmesh.actors.state.item import Name

_WORDS = struct.Struct("<4I")
_MOST = 15  # as TinyLFU: what is seen more often is simply popular


class FrequencySketch:
    """A count-min sketch that halves all counts after every `8 * width` sightings, so that what was
    popular yesterday gives way. Keys are cryptographic hashes: their own words serve as rows.

    width: counters per row, a power of two; about the number of names worth telling apart.
    """

    def __init__(self, width: int = 1 << 16) -> None:
        if width < 1 or width & (width - 1):
            raise ValueError(f"width {width} is not a power of two")
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(4)]
        self._sightings, self._period = 0, 8 * width

    def add(self, name: Name) -> int:
        """One more sighting; returns how many there were lately, this one included."""
        places = self._places(name)
        seen = min(row[at] for row, at in places)
        if seen < _MOST:
            for row, at in places:
                if row[at] == seen:  # conservative update: only what limits the estimate grows
                    row[at] = seen + 1
            seen += 1
        self._sightings += 1
        if self._sightings == self._period:
            self._halve()
        return seen

    def count(self, name: Name) -> int:
        """Never too low (between halvings), seldom too high."""
        return min(row[at] for row, at in self._places(name))

    def _places(self, name: Name) -> list[tuple[bytearray, int]]:
        """One counter per row, from words of the key that are independent."""
        mask, kind = self._mask, int(name.kind)
        a, b, c, d = _WORDS.unpack_from(name.key)
        rows = self._rows
        return [
            (rows[0], (a ^ kind) & mask),
            (rows[1], (b ^ kind) & mask),
            (rows[2], (c ^ kind) & mask),
            (rows[3], (d ^ kind) & mask),
        ]

    def _halve(self) -> None:
        for row in self._rows:
            counts = np.frombuffer(row, dtype=np.uint8)
            np.right_shift(counts, 1, out=counts)
        self._sightings //= 2
