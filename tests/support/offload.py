"""Drives a Model over a long text whose old pages leave the device, without an engine."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.actors.model.batch import NO_PAGE, PAGE_TOKENS, Batch, Span, prompt_tail
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.offload.context import Mode, Offload, OffloadedContext
from expertmesh.kernels.mla.types import NO_TAIL
from tests.support.runner import Runner


class LongText:
    """One sequence in slot 0. Device pages: as many as the window asks for, and those of one chunk;
    each is poisoned when it is given back."""

    def __init__(self, runner: Runner, shared: Offload, mode: Mode | None, chunk: int) -> None:
        """mode: None keeps all on the device, up to the runner's pages."""
        self.runner, self.chunk = runner, chunk
        self.context: OffloadedContext | None = None if mode is None else shared.context(mode)
        self.pages: list[int] = []
        self.free = list(range(runner.state.pages))
        self.length = self.most = 0
        self.tail = NO_TAIL
        runner.state.zero_slot(0)

    @property
    def state(self) -> ModelState:
        return self.runner.state

    def step(self, ids: Sequence[int], *, decode: bool) -> Tensor:
        """Logits of the last row, fp32 [V]."""
        end = self.length + len(ids)
        while len(self.pages) * PAGE_TOKENS < end:
            self.pages.append(self.free.pop())
        self.most = max(self.most, sum(page != NO_PAGE for page in self.pages))
        span = Span(
            0, 0, len(ids), self.length, list(self.pages), decode,
            context=self.context, tail=self.tail,
        )  # fmt: skip
        batch = Batch(torch.tensor(ids), [span], torch.tensor([len(ids) - 1]))
        logits = self.runner.model.forward(batch, self.state, self.runner.exchange)
        self.length = end
        if self.context is not None:
            gone = self.context.leave(self.state.latents, self.pages, end)
            self.state.paged()[:, gone] = float("nan")
            self.free += gone
        return logits[0]

    def prompt(self, ids: Sequence[int]) -> Tensor:
        """Ends on the grid but for the last piece."""
        self.tail = prompt_tail(self.length + len(ids))
        rows = [
            self.step(ids[i : i + self.chunk], decode=False) for i in range(0, len(ids), self.chunk)
        ]
        return rows[-1]

    def forced(self, ids: Sequence[int]) -> Tensor:
        """One by one, as generated tokens are. Logits of every row, [n, V]."""
        return torch.stack([self.step([token], decode=True) for token in ids])
