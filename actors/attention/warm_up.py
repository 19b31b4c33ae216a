"""Every kernel of a pass called once before there are requests.

A GPU's kernels are compiled when they are first called, for longer than the other ranks of a step
wait for this one.
"""

import torch
from torch import Tensor

from expertmesh.actors.model.batch import Batch, Span
from expertmesh.actors.model.model import Model

ROWS = 32


class NoExperts:
    """An exchange that answers zeros."""

    def begin_step(self, rows: int, micros: int = 1) -> None:
        pass

    def dispatch(
        self, layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, micro: int = 0
    ) -> Tensor:
        return torch.zeros(z_TD.shape, dtype=torch.float32, device=z_TD.device)

    def combine(self, pending: Tensor) -> Tensor:
        return pending

    def end_step(self) -> None:
        pass


def warm_up(model: Model) -> None:
    """A prompt of ROWS tokens and one decode step, recorded where such are; over a state of its
    own."""
    state = model.new_state(pages=1, slots=1)
    for position, rows, decode in ((0, ROWS, False), (ROWS, 1, True)):
        span = Span(0, 0, rows, position, [0], decode)
        tokens = torch.zeros(rows, dtype=torch.int64)
        model.forward(Batch(tokens, [span], torch.tensor([rows - 1])), state, NoExperts())
