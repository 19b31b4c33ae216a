"""The hit rate that a cache without limits would have had, in a few kilobytes."""

import math
from collections.abc import Iterable

_HASH_BITS = 64


class Ceiling:
    """HyperLogLog of the keys that were looked up: with N look-ups of U different keys no cache can
    have hit more than (N - U) / N of them (kv-state 3.6).

    U is Ertl's improved raw estimate (arXiv 1702.01284, section 4), which needs no bias tables and
    is right from the first key on; its relative error is about 1.04 / sqrt(2 ** precision).
    Keys must be hashes already: they are, of 32 bytes.
    """

    def __init__(self, precision: int = 14) -> None:
        if not 4 <= precision <= 18:
            raise ValueError(f"precision {precision} is not within 4..18")
        self._precision = precision
        self._registers = bytearray(1 << precision)
        self._histogram = [0] * (_HASH_BITS - precision + 2)  # registers by value
        self._histogram[0] = 1 << precision
        self.lookups = 0

    def add(self, keys: Iterable[bytes]) -> None:
        """Counts one look-up of each key."""
        rest = _HASH_BITS - self._precision
        for key in keys:
            word = int.from_bytes(key[:8], "little")
            at, tail = word >> rest, word & ((1 << rest) - 1)
            rank = rest - tail.bit_length() + 1
            old = self._registers[at]
            if rank > old:
                self._registers[at] = rank
                self._histogram[old] -= 1
                self._histogram[rank] += 1
            self.lookups += 1

    @property
    def distinct(self) -> float:
        """Estimate of the number of different keys."""
        size = len(self._registers)
        count = self._histogram
        if count[0] == size:
            return 0.0
        last = _HASH_BITS - self._precision + 1
        total = size * _tau(1 - count[last] / size)
        for rank in range(last - 1, 0, -1):
            total = 0.5 * (total + count[rank])
        total += size * _sigma(count[0] / size)
        return size * size / (2 * math.log(2) * total) if total else math.inf

    @property
    def ratio(self) -> float:
        """Between 0 and 1; 0 before the first look-up."""
        if not self.lookups:
            return 0.0
        return max(0.0, 1 - self.distinct / self.lookups)


def _sigma(x: float) -> float:
    """x + sum over k >= 1 of x ** 2 ** k * 2 ** (k - 1): registers that are still zero."""
    if x == 1.0:
        return math.inf
    total, weight = x, 1.0
    while True:
        x *= x
        before, total = total, total + x * weight
        weight *= 2
        if total == before:
            return total


def _tau(x: float) -> float:
    """(1 - x - sum over k >= 1 of (1 - x ** 2 ** -k) ** 2 * 2 ** -k) / 3: full registers."""
    if x in (0.0, 1.0):
        return 0.0
    total, weight = 1 - x, 1.0
    while True:
        x = math.sqrt(x)
        weight *= 0.5
        before, total = total, total - (1 - x) ** 2 * weight
        if total == before:
            return total / 3
