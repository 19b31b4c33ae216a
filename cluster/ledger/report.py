"""A report on the routing: numbers per layer, ready for JSON, tables and heat maps.

It is made of a running mesh's ledger or of a recorded file, and looks the same.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from expertmesh.cluster.ledger.coactivation import Pair
from expertmesh.cluster.ledger.measures import entropy, gini, imbalance, layer_rank_loads
from expertmesh.cluster.placement import Placement

# An expert counts as never hit when equal shares would have given it at least so many hits.
EXPECTED_HITS = 20.0


class LayerReport(msgspec.Struct):
    """layer: absolute number. None: no load. loads: per expert, hits (decayed in a running mesh).

    entropy: of the shares, 0 to 1. rank_loads: per expert actor, with an expert's load shared
    evenly by its copies. imbalance: largest over mean of them. dead: experts in alarm. unhit:
    experts without a hit in all that is remembered, though 20 would be an equal share. pairs:
    experts chosen together more often than chance would have it, only from a recording.
    """

    layer: int
    hits: float
    gini: float | None
    entropy: float | None
    imbalance: float | None
    dead: list[int]
    unhit: list[int]
    loads: list[float]
    rank_loads: list[float]
    pairs: list[Pair] = []


class ActorReport(msgspec.Struct):
    """An expert actor in the remembered windows. busy_share: of the time, 0 to 1."""

    seat: str
    rows: float
    busy_share: float


class Report(msgspec.Struct):
    """windows: how many the ledger has seen, 0 for a recording; half_life is in windows.

    fan_out: distinct expert actors per token and layer; None without an expert tier or load.
    alarms: those that hold now, by kind.
    """

    model: str
    experts: int
    top_k: int
    windows: int
    half_life: float
    fan_out: float | None
    layers: list[LayerReport]
    actors: list[ActorReport] = []
    alarms: dict[str, int] = {}

    @property
    def imbalances(self) -> list[float]:
        """Of the layers that have load."""
        return [one.imbalance for one in self.layers if one.imbalance is not None]


def layer_reports(
    layers: Sequence[int],
    hits_LE: np.ndarray,
    placement: Placement | None,
    dead_LE: np.ndarray | None = None,
    pairs: Sequence[Sequence[Pair]] = (),
) -> list[LayerReport]:
    """hits_LE: in the order of `layers`. dead_LE: experts in alarm. pairs: per layer."""
    ranks_LA = layer_rank_loads(hits_LE, layers, placement)
    entropy_L = entropy(hits_LE)
    reports = []
    for i, layer in enumerate(layers):
        hits_E = hits_LE[i]
        total = float(hits_E.sum())
        enough = total >= EXPECTED_HITS * len(hits_E)
        reports.append(
            LayerReport(
                layer=layer,
                hits=round(total, 1),
                gini=gini(hits_E),
                entropy=float(entropy_L[i]) if total else None,
                imbalance=imbalance(ranks_LA[i]),
                dead=[] if dead_LE is None else np.flatnonzero(dead_LE[i]).tolist(),
                unhit=np.flatnonzero(hits_E == 0).tolist() if enough else [],
                loads=_rounded(hits_E),
                rank_loads=_rounded(ranks_LA[i]),
                pairs=list(pairs[i]) if pairs else [],
            )
        )
    return reports


def _rounded(values: np.ndarray) -> list[float]:
    """A report at K3's shape has 82 432 loads: a tenth of a hit is enough."""
    rounded: list[float] = np.round(values, 1).tolist()
    return rounded
