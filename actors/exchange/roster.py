"""What one member must know of its epoch: who is in it, where to meet, who holds which expert."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# layer -> for each expert actor, the experts it holds, by slot
Placed = Mapping[int, Sequence[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Roster:
    """Ranks 0..attention-1 are attention replicas, the next `experts` ranks are expert actors.

    placed: absolute layer number -> per expert actor, its experts in slot order.
    store: host and port of the TCPStore on rank 0's node.
    """

    epoch: int
    attention: int
    experts: int
    placed: Placed
    store: tuple[str, int]

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

    def slot_tables(self, num_experts: int) -> dict[int, list[Tensor]]:
        """layer -> per expert actor, int32 [num_experts]: local slot, or -1 if held elsewhere."""
        tables: dict[int, list[Tensor]] = {}
        for layer, actors in self.placed.items():
            rows = []
            for held in actors:
                table = torch.full((num_experts,), -1, dtype=torch.int32)
                table[torch.tensor(list(held), dtype=torch.int64)] = torch.arange(
                    len(held), dtype=torch.int32
                )
                rows.append(table)
            tables[layer] = rows
        return tables
