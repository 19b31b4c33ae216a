"""Two ways to do one thing, timed in turn in one run: ratios bear the load of other processes."""

import statistics
import time
from collections.abc import Callable, Sequence

import msgspec


class Spread(msgspec.Struct, frozen=True):
    """Of one quantity over all rounds."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """low and high are the quartiles."""
        if len(values) == 1:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


class Pair(msgspec.Struct, frozen=True):
    """Seconds of each, and first / second of each round."""

    first: Spread
    second: Spread
    ratio: Spread
    rounds: int


def alternate(first: Callable[[], object], second: Callable[[], object], rounds: int) -> Pair:
    """Both once in every round, in turns first; one round more goes before, uncounted."""
    taken: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds + 1):
        order = ((0, first), (1, second)) if at % 2 else ((1, second), (0, first))
        for which, run in order:
            began = time.perf_counter()
            run()
            taken[which].append(time.perf_counter() - began)
    a, b = taken[0][1:], taken[1][1:]
    ratios = [one / other for one, other in zip(a, b, strict=True)]
    return Pair(Spread.of(a), Spread.of(b), Spread.of(ratios), rounds)
