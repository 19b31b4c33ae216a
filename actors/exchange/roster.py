"""What one member must know of its epoch: who is in it, where to meet, who holds which expert."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# layer -> for each expert actor, the experts it holds; an expert may be with several
Placed = Mapping[int, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Routing:
    """Who holds which expert from some step on. A later version replaces an earlier one."""

    version: int
    placed: Placed


@dataclass(frozen=True, slots=True)
class Roster:
    """Ranks 0..attention-1 are attention replicas, the next `experts` ranks are expert actors.

    placed: absolute layer number -> per expert actor, its experts.
    store: host and port of the rendezvous, in rank 0's process.
    version: of `placed`; the epoch's first step uses it unless all ranks know a newer one.
    meet_s: all ranks must have met within so long; unset: the exchange settings say.
    """

    epoch: int
    attention: int
    experts: int
    placed: Placed
    store: tuple[str, int]
    version: int = 0
    meet_s: float | None = None

    @property
    def size(self) -> int:
        return self.attention + self.experts

    @property
    def layers(self) -> tuple[int, ...]:
        """MoE layers in the order in which a step visits them."""
        return tuple(sorted(self.placed))

    def name(self, rank: int) -> str:
        if rank < self.attention:
            return f"attention {rank}"
        return f"expert {rank - self.attention}"


def holders(held: Sequence[Sequence[int]], num_experts: int) -> NDArray[np.bool_]:
    """[P, E]: actor p has a copy of expert e."""
    holds_PE = np.zeros((len(held), num_experts), dtype=np.bool_)
    for actor, experts in enumerate(held):
        holds_PE[actor, list(experts)] = True
    return holds_PE
