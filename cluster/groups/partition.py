"""Groups from what is known of a model: recorded routing, or the routers' weights."""

from collections.abc import Mapping

import numpy as np
import pymetis
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from expertmesh.cluster.groups import graph
from expertmesh.cluster.groups.refine import even_loads
from expertmesh.cluster.groups.types import Floats, Groups, Ints, contiguous, group_sizes
from expertmesh.cluster.ledger.recording import Recording

# METIS takes whole numbers. This many tell edges apart; those that round to none cost it no time.
WEIGHT_SUM = 2**20


class GroupSettings(BaseModel):
    """How groups are made. Frozen; unknown keys are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_imbalance: float = Field(
        default=1.02,
        ge=1.0,
        description="Largest load of a group over the mean in the traffic they are made from. "
        "Below what is allowed in service, as later traffic differs. Where spare slots will hold "
        "copies that level the load, more keeps groups that belong together better.",
    )
    seed: int = Field(default=0, ge=0, description="Of the partitioner.")


def groups_from_recording(
    recording: Recording, count: int, settings: GroupSettings | None = None
) -> Groups:
    """Groups by co-activation in the recorded tokens, even in all hits that were counted.

    A layer without traffic keeps the contiguous groups. Raises PlacementError when a group would
    stay empty.
    """
    settings = settings or GroupSettings()
    of: dict[int, Ints] = {}
    for index, layer in enumerate(recording.layers):
        pairs_EE = graph.together(recording.trace_NLK[:, index], recording.experts)
        load_E = recording.hits_LE[index].astype(np.float64)
        of[layer] = partition(graph.beyond_chance(pairs_EE), load_E, count, settings)
    return Groups(of, count)


def groups_from_routers(
    weights: Mapping[int, NDArray[np.floating]], count: int, settings: GroupSettings | None = None
) -> Groups:
    """Groups by the likeness of the routers' rows, as a prior. weights: layer -> float [E, H].

    Raises PlacementError when a group would stay empty.
    """
    settings = settings or GroupSettings()
    of = {
        layer: partition(
            graph.router_similarity(weight_EH), np.ones(len(weight_EH)), count, settings
        )
        for layer, weight_EH in sorted(weights.items())
    }
    return Groups(of, count)


def partition(graph_EE: Floats, load_E: Floats, count: int, settings: GroupSettings) -> Ints:
    """int64 [E]: parts of equal size (by at most one) and near equal load, heavy edges inside.

    Deterministic. Contiguous where there is nothing to go by.
    """
    part_E = contiguous(len(load_E), count)
    if count == 1:
        return part_E
    if graph_EE.any():
        part_E = exact_sizes(_metis(graph_EE, count, settings.seed), graph_EE, count)
    return even_loads(part_E, graph_EE, load_E, count, settings.max_imbalance)


def _metis(graph_EE: Floats, count: int, seed: int) -> Ints:
    """int64 [E]: METIS's partition by number of experts; by bisections, as its direct k-way method
    puts everything into a few parts when they shall have two or three members."""
    whole_EE = np.rint(graph_EE * (WEIGHT_SUM / graph_EE.sum())).astype(np.int64)
    edges = whole_EE > 0
    starts = np.concatenate([[0], np.cumsum(edges.sum(axis=1))])
    options = pymetis.Options(seed=seed, ufactor=1)
    found = pymetis.part_graph(
        count,
        pymetis.CSRAdjacency(starts, np.nonzero(edges)[1]),
        eweights=whole_EE[edges],
        recursive=True,
        options=options,
    )
    return np.array(found.vertex_part, np.int64)


def exact_sizes(part_E: Ints, graph_EE: Floats, count: int) -> Ints:
    """int64 [E]: moves the experts that lose least until sizes differ by at most one.

    METIS promises its balance only nearly. Parts that are largest already get the larger size.
    """
    part_E = part_E.copy()
    sizes = np.bincount(part_E, minlength=count)
    wanted = np.empty(count, np.int64)
    wanted[np.argsort(-sizes, kind="stable")] = group_sizes(len(part_E), count)
    while (surplus := sizes > wanted).any():
        to_part_EP = graph_EE @ np.eye(count)[part_E]
        loss_EP = to_part_EP[np.arange(len(part_E)), part_E][:, None] - to_part_EP
        movers, targets = np.flatnonzero(surplus[part_E]), np.flatnonzero(sizes < wanted)
        losses = loss_EP[np.ix_(movers, targets)]
        row, column = np.unravel_index(int(losses.argmin()), losses.shape)
        expert, target = movers[row], targets[column]
        sizes[part_E[expert]] -= 1
        sizes[target] += 1
        part_E[expert] = target
    return part_E
