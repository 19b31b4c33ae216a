"""Who holds what, maybe with gaps: the expert ranks of a mesh, in an epoch or before the next."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from expertmesh.cluster.balancing.recovery import Recovery, recover
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.placement import Placement

Share = dict[int, tuple[int, ...]]


@dataclass
class ExpertRanks:
    """workers[r] is the actor behind rank r of `placement`, which may lack experts after a loss.

    experts: per layer.
    """

    experts: int
    placement: Placement
    workers: list[Worker] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Every expert has a copy."""
        return all(
            len({e for ids in actors for e in ids}) == self.experts
            for actors in self.placement.held.values()
        )

    def rank_of(self, worker: Worker) -> int:
        return self.workers.index(worker)

    def remove(self, worker: Worker) -> None:
        """With its rank and its copies."""
        rank = self.rank_of(worker)
        del self.workers[rank]
        held = {
            layer: actors[:rank] + actors[rank + 1 :]
            for layer, actors in self.placement.held.items()
        }
        self.placement = Placement(held)

    def add(self, worker: Worker) -> None:
        """As the last rank, with what it has loaded."""
        self.workers.append(worker)
        held = {
            layer: (*actors, tuple(worker.held.get(layer, ())))
            for layer, actors in self.placement.held.items()
        }
        self.placement = Placement(held)

    def drop(self, copies: Mapping[int, Mapping[int, Sequence[int]]]) -> None:
        """rank -> layer -> experts that it has no more."""
        held = {
            layer: tuple(
                tuple(e for e in ids if e not in copies.get(rank, {}).get(layer, ()))
                for rank, ids in enumerate(actors)
            )
            for layer, actors in self.placement.held.items()
        }
        self.placement = Placement(held)

    def recovery(self, slots: int) -> Recovery:
        """How the workers here can hold every expert. Raises NoCapacity."""
        return recover(self.placement, frozenset(), slots, self.experts)


def share_of_newcomer(
    ranks: ExpertRanks,
    slots: int,
    loads: Mapping[int, NDArray[np.float64]] | None = None,
    promised: Iterable[Share] = (),
) -> Share:
    """What an actor that joins should load: first the experts nobody holds, then those with the
    fewest copies, the most used first. At most `slots` of each layer.

    loads: layer -> hits per expert [E]; unset before any traffic. promised: what others who are
    about to join will hold.
    """
    share: Share = {}
    promised = list(promised)
    for layer, actors in ranks.placement.held.items():
        copies = Counter(dict.fromkeys(range(ranks.experts), 0))
        for ids in (*actors, *(other.get(layer, ()) for other in promised)):
            copies.update(ids)
        hits = None if loads is None else loads.get(layer)

        def urgency(
            expert: int, copies: Counter[int] = copies, hits: NDArray[np.float64] | None = hits
        ) -> tuple[int, float, int]:
            return copies[expert], 0.0 if hits is None else -float(hits[expert]), expert

        share[layer] = tuple(sorted(sorted(copies, key=urgency)[:slots]))
    return share


def with_copies(held: Share, more: Mapping[int, Sequence[int]]) -> Share:
    """What is held after `more` (layer -> experts) has come, each once."""
    added = {layer: (*held.get(layer, ()), *ids) for layer, ids in more.items()}
    return held | {layer: tuple(dict.fromkeys(ids)) for layer, ids in added.items()}
