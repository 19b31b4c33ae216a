"""Neighbours that are alike, of which many are done at once."""

from collections.abc import Iterable, Iterator
from itertools import groupby


def runs(keys: Iterable[object]) -> Iterator[slice]:
    """Where keys are equal, as slices in order. Costs next to nothing for each key."""
    end = 0
    for _, run in groupby(keys):
        begin, end = end, end + len(list(run))
        yield slice(begin, end)
