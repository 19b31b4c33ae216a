"""Placements as arrays and back. L layers, P actors, S slots per actor, E experts."""

from collections.abc import Iterable
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Rows = tuple[tuple[int, ...], ...]
Ints = NDArray[np.int64]
Ids = NDArray[np.int32]
Floats = NDArray[np.float64]

FREE = -1
"""In a table: a slot without an expert."""


def to_table(layers: Iterable[Rows], actors: int, slots: int) -> Ints:
    """int64 [L, P, S], free slots last. Actors that a layer does not list are empty."""
    rows = [ids for layer in layers for ids in layer + ((),) * (actors - len(layer))]
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    if sizes.size and sizes.min() == sizes.max() == slots:
        return flat.reshape(-1, actors, slots)
    table = np.full((len(rows), slots), FREE)
    table[np.arange(slots) < sizes[:, None]] = flat
    return table.reshape(-1, actors, slots)


def changed_rows(layers: list[Rows], table_LPS: Ints, new_LPS: Ids) -> list[Rows]:
    """The layers of `table_LPS` with the actors changed that differ in the new one."""
    actors = table_LPS.shape[1]
    changed_A = (table_LPS != new_LPS).any(2).reshape(-1)
    new_NS = new_LPS.reshape(len(changed_A), -1)[changed_A]
    new = new_NS.tolist()
    if (new_NS == FREE).any():
        new = [[expert for expert in ids if expert != FREE] for ids in new]
    rows = [ids for layer in layers for ids in layer]
    for at, ids in zip(np.flatnonzero(changed_A).tolist(), new, strict=True):
        rows[at] = tuple(ids)
    return [tuple(rows[begin : begin + actors]) for begin in range(0, len(rows), actors)]


def over_ranks(rows: Rows, staying: list[int], ranks: int) -> Rows:
    if len(rows) == ranks:
        return rows
    of_actor = dict(zip(staying, rows, strict=True))
    return tuple(of_actor.get(actor, ()) for actor in range(ranks))
