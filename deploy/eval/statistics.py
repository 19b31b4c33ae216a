"""Intervals for shares of right answers, alone and paired."""

import math

import msgspec

Z95 = 1.959963984540054


class Share(msgspec.Struct, frozen=True):
    """right of n, with Wilson's 95 % interval."""

    right: int
    n: int
    share: float
    low: float
    high: float

    @staticmethod
    def of(right: int, n: int) -> "Share":
        if n == 0:
            return Share(0, 0, math.nan, 0.0, 1.0)
        share, z2 = right / n, Z95**2
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
        # None and all are ends of their own intervals; rounding would put them beyond.
        low, high = max(0.0, middle - half), min(1.0, middle + half)
        return Share(right, n, share, min(low, share), max(high, share))


class Loss(msgspec.Struct, frozen=True):
    """What a second way of answering the same n questions loses, in points of 100.

    lost, gained: answers that only the first, only the second way got right. low, high: 95 %, Wald
    with half a count added to every cell (Agresti and Min 2005), which holds at few changes too.
    """

    n: int
    lost: int
    gained: int
    points: float
    low: float
    high: float

    @staticmethod
    def of(first: list[bool], second: list[bool]) -> "Loss":
        """Raises ValueError for different numbers of answers."""
        pairs = list(zip(first, second, strict=True))
        lost = sum(a and not b for a, b in pairs)
        gained = sum(b and not a for a, b in pairs)
        n = len(pairs) + 2
        delta = (lost - gained) / n
        half = Z95 * math.sqrt(max(0.0, (lost + gained + 1) - n * delta**2)) / n
        points = 100 * (lost - gained) / max(1, len(pairs))
        return Loss(len(pairs), lost, gained, points, 100 * (delta - half), 100 * (delta + half))
