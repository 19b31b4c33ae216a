"""What a rank announces when it enters a step, and the plan that all ranks derive from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.exchange.wire import MAGIC, Round

OPEN, LEAVE = 1, 2
WORDS = 10
# Padded messages come in few sizes, so that their buffers are made once.
SMALLEST_CAPACITY = 8
# The first layer of a rank that has no rows in the step: later than all.
NO_LAYER = 2**31


class Opening(NamedTuple):
    """One announcement. Attention rank `rank` enters `step` with `rows` in `micros` parts.

    version: the newest routing it knows. first_layer: it needs the layers from this one on.
    """

    epoch: int
    step: int
    rank: int
    rows: int
    micros: int
    version: int
    first_layer: int
    kind: int = OPEN

    def write(self, message: Tensor) -> None:
        message.copy_(torch.tensor([MAGIC, *self, 0]))

    @staticmethod
    def read(message: Tensor) -> "Opening":
        magic, *fields, _ = message.tolist()
        return Opening(*fields) if magic == MAGIC else Opening(-1, -1, -1, 0, 0, -1, NO_LAYER)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all ranks of an epoch agree on before the first row travels.

    capacity: rows that one padded message holds. A layer takes micros x chunks rounds. A step
    whose first_layer is behind the last has no rounds at all.
    """

    epoch: int
    step: int
    micros: int
    chunks: int
    capacity: int
    version: int
    first_layer: int

    @staticmethod
    def of(openings: list[Opening], max_rows: int) -> "StepPlan":
        rows = max(opening.rows for opening in openings)
        capacity = SMALLEST_CAPACITY
        while capacity < min(rows, max_rows):
            capacity *= 2
        return StepPlan(
            epoch=openings[0].epoch,
            step=openings[0].step,
            micros=max(opening.micros for opening in openings),
            chunks=max(1, -(-rows // max_rows)),
            capacity=min(capacity, max_rows),
            version=min(opening.version for opening in openings),
            first_layer=min(opening.first_layer for opening in openings),
        )

    def parts(self, layers: tuple[int, ...]) -> list[tuple[int, int]]:
        """(layer, micro-batch) in the order of the step."""
        needed = [layer for layer in layers if layer >= self.first_layer]
        return [(layer, micro) for layer in needed for micro in range(self.micros)]

    def rounds(self, layers: tuple[int, ...]) -> Iterator[Round]:
        """Every round of the step in its order."""
        for layer, micro in self.parts(layers):
            for chunk in range(self.chunks):
                yield Round(self.epoch, self.step, layer, micro, chunk)
