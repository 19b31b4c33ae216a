"""The routing at a glance: what the dashboard page draws, of bounded size at any number of experts.

Loads are relative to an even share (1 is even), so that layers compare.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from expertmesh.cluster.ledger.measures import entropy, imbalance, layer_rank_loads
from expertmesh.cluster.placement import Placement

# Columns of a layer's hit distribution; with more experts a column is the mean of several.
COLUMNS = 64


class LayerOverview(msgspec.Struct):
    """layer: absolute number. None, and empty lists: no load.

    ranks: per expert actor. spread: of the experts, busiest first, in at most COLUMNS columns.
    imbalance: largest over mean of the ranks. entropy: of the experts' shares, 0 to 1. dead:
    experts in alarm.
    """

    layer: int
    ranks: list[float] = []
    spread: list[float] = []
    imbalance: float | None = None
    entropy: float | None = None
    dead: int = 0


class Overview(msgspec.Struct):
    """windows: how many the ledger has closed; nothing here changes in between. seats: of the
    ranks. fan_out: distinct expert actors per token and layer. alarms: that hold, by kind."""

    windows: int
    experts: int
    top_k: int
    seats: list[str]
    fan_out: float | None
    layers: list[LayerOverview]
    alarms: dict[str, int] = {}


def layer_overviews(
    layers: Sequence[int], hits_LE: np.ndarray, placement: Placement | None, dead_LE: np.ndarray
) -> list[LayerOverview]:
    """hits_LE: in the order of `layers`."""
    ranks_LA = layer_rank_loads(hits_LE, layers, placement)
    spread_LC, entropy_L = _spread(hits_LE), entropy(hits_LE)
    found = []
    for i, layer in enumerate(layers):
        total, dead = float(hits_LE[i].sum()), int(dead_LE[i].sum())
        if total <= 0:
            found.append(LayerOverview(layer, dead=dead))
            continue
        uneven = imbalance(ranks_LA[i])
        found.append(
            LayerOverview(
                layer=layer,
                ranks=_rounded(ranks_LA[i] * ranks_LA.shape[1] / total),
                spread=_rounded(spread_LC[i] * hits_LE.shape[1] / total),
                imbalance=None if uneven is None else round(uneven, 4),
                entropy=round(float(entropy_L[i]), 4),
                dead=dead,
            )
        )
    return found


def _spread(hits_LE: np.ndarray) -> np.ndarray:
    """[L, columns]: sorted hits, largest first, a mean of neighbours where there are too many."""
    sorted_LE = -np.sort(-hits_LE, axis=1)
    experts = hits_LE.shape[1]
    columns = min(experts, COLUMNS)
    starts = np.arange(columns) * experts // columns
    sums: np.ndarray = np.add.reduceat(sorted_LE, starts, axis=1)
    return sums / np.diff([*starts, experts])


def _rounded(values: np.ndarray) -> list[float]:
    rounded: list[float] = np.round(values, 2).tolist()
    return rounded
