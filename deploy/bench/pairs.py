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
    """Seconds of each by one clock, and first / second of each round."""

    first: Spread
    second: Spread
    ratio: Spread

    @staticmethod
    def of(first: Sequence[float], second: Sequence[float]) -> "Pair":
        ratios = [a / max(b, 1e-9) for a, b in zip(first, second, strict=True)]
        return Pair(Spread.of(first), Spread.of(second), Spread.of(ratios))


class Clocks(msgspec.Struct, frozen=True):
    """wall: what a user waits. cpu: what this process computed, whoever else had the cores."""

    wall: Pair
    cpu: Pair
    rounds: int


# Shorter runs are repeated within a round: a clock and a scheduler have their grain.
LEAST_SECONDS = 0.02
MOST_REPEATS = 50


def alternate(
    first: Callable[[], object],
    second: Callable[[], object],
    rounds: int,
    least_s: float = LEAST_SECONDS,
) -> Clocks:
    """Both in every round, in turns first, each as often as takes about `least_s`."""
    runs = (first, second)
    times = min(MOST_REPEATS, max(1, round(least_s / max(map(_seconds, runs)))))
    wall: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    for at in range(rounds):
        for which in (1, 0) if at % 2 else (0, 1):
            began, used = time.perf_counter(), time.process_time()
            for _ in range(times):
                runs[which]()
            cpu[which].append((time.process_time() - used) / times)
            wall[which].append((time.perf_counter() - began) / times)
    return Clocks(Pair.of(*wall), Pair.of(*cpu), rounds)


def _seconds(run: Callable[[], object]) -> float:
    """Of the first call, which also warms up."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
