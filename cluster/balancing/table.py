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


REMEMBERED = 512
"""Layers, about: a plan mostly starts from the one before, which was an array then."""
_remembered: dict[int, tuple[Rows, NDArray[np.integer]]] = {}
"""id of a layer -> it, so that the id stays its own, and its table. Plans are the same without."""


def to_table(layers: Iterable[Rows], actors: int, slots: int) -> Ints:
    """int64 [L, P, S], free slots last. Actors that a layer does not list are empty."""
    layers = list(layers)
    known = [_remembered.get(id(layer)) for layer in layers]
    tables = [it[1] for it in known if it is not None and it[1].shape == (actors, slots)]
    if len(tables) == len(layers) and tables:
        return np.stack(tables).astype(np.int64, copy=False)
    table_LPS = _converted(layers, actors, slots)
    _remember(layers, table_LPS.copy())
    return table_LPS


def _converted(layers: list[Rows], actors: int, slots: int) -> Ints:
    rows = [ids for layer in layers for ids in layer + ((),) * (actors - len(layer))]
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    if sizes.size and sizes.min() == sizes.max() == slots:
        return flat.reshape(-1, actors, slots)
    table = np.full((len(rows), slots), FREE)
    table[np.arange(slots) < sizes[:, None]] = flat
    return table.reshape(-1, actors, slots)


def _remember(layers: list[Rows], table_LPS: NDArray[np.integer]) -> None:
    if len(_remembered) > REMEMBERED:
        _remembered.clear()
    for layer, ids_PS in zip(layers, table_LPS, strict=True):
        _remembered[id(layer)] = layer, ids_PS


def changed_rows(layers: list[Rows], table_LPS: Ints, new_LPS: Ids) -> list[Rows]:
    """The layers of `table_LPS` with the actors changed that differ in the new one."""
    changed_LP = (table_LPS != new_LPS).any(2)
    new = new_LPS[changed_LP].tolist()
    if (new_LPS == FREE).any():
        new = [[expert for expert in ids if expert != FREE] for ids in new]
    rows = list(layers)
    taken = 0
    for layer in np.flatnonzero(changed_LP.any(1)).tolist():
        held = list(layers[layer])
        at = np.flatnonzero(changed_LP[layer]).tolist()
        for actor, ids in zip(at, new[taken : taken + len(at)], strict=True):
            held[actor] = tuple(ids)
        taken += len(at)
        rows[layer] = tuple(held)
    _remember(rows, new_LPS)
    return rows


def over_ranks(rows: Rows, staying: list[int], ranks: int) -> Rows:
    if len(rows) == ranks:
        return rows
    of_actor = dict(zip(staying, rows, strict=True))
    return tuple(of_actor.get(actor, ()) for actor in range(ranks))
