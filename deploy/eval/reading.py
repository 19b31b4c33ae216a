"""Ways to read the old tokens of a text that has been read once, and what each of them keeps.

The control is `blind`: nothing of old tokens is read. Where a model answers right all the same, its
answer came through the recurrent state, and a mode that loses nothing there has shown nothing.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec
from torch import Tensor

from expertmesh.actors.model.batch import NO_PAGE, PAGE_TOKENS, Context
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.offload.context import OffloadedContext
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import StateSettings
from expertmesh.deploy.eval.subject import Subject

Reads = Literal["exact", "offload", "select", "blind"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to keep old tokens. The first of several is what the others are compared with."""

    name: str
    reads: Reads = "exact"
    state: StateSettings = field(default_factory=StateSettings)


class Held(msgspec.Struct, frozen=True):
    """Bytes of one sequence that answers: near pages, sketches, and old pages of late steps, all on
    the device; and old pages in host memory. scratch: rows gathered for one layer, on the device,
    shared by all sequences. whole: its latents in full. share: (near + index + recent) / whole.
    recent is that of all questions about a text: one alone has as much or less.
    """

    near: int
    index: int
    recent: int
    scratch: int
    host: int
    whole: int

    @property
    def share(self) -> float:
        return (self.near + self.index + self.recent) / self.whole


class Reader:
    """How the old pages of one text are read by whatever follows it. context: None where all are
    on the device."""

    def __init__(self, subject: Subject, mode: Mode, state: ModelState, length: int) -> None:
        """state: has the text, `length` tokens, in its pages 0, 1, ..."""
        self.length, self._page_bytes = length, state.page_bytes
        self.context: Context | None = None
        self.far: OffloadedContext | None = None
        self._old = range(0)
        if mode.reads == "exact":
            return
        offload = subject.offload(mode.state)
        far = offload.context("select" if mode.reads == "select" else "offload")
        self._old = far.leaving(length)
        if mode.reads == "blind":
            self.context = Near(offload.rank)
            return
        for page in self._old:
            far.take(state.paged()[:, page])
        self.context = self.far = far

    def table(self, own: list[int]) -> list[int]:
        """Page numbers of a sequence that goes on from the text on pages of its own."""
        whole = range(self.length // PAGE_TOKENS)
        return [NO_PAGE if page in self._old else page for page in whole] + own

    def held(self, tokens: int) -> Held:
        """Of a sequence that has `tokens` after the text."""
        pages, far = pages_for(self.length + tokens), self.far
        near = (pages - len(self._old)) * self._page_bytes
        whole = pages * self._page_bytes
        if far is None:
            return Held(near, 0, 0, 0, 0, whole)
        return Held(
            near, far.index_bytes, far.recent_bytes, far.scratch_bytes, far.host_bytes, whole
        )


class Near:
    """A Context that has no old pages: a query attends to what is on the device and nothing else.
    These layers know no positions (NoPE), so what is left needs no moving together."""

    def __init__(self, rank: int) -> None:
        """rank: leading columns of a row that are values."""
        self._rank = rank

    def decode(
        self, layer: int, q_HC: Tensor, cache: Tensor, pages: list[int], length: int, scale: float
    ) -> Tensor:
        used = pages_for(length)
        near = [page for page in pages[:used] if page != NO_PAGE]
        end = len(near) * PAGE_TOKENS - (used * PAGE_TOKENS - length)
        paged = cache[: cache.shape[0] // PAGE_TOKENS * PAGE_TOKENS].view(
            -1, PAGE_TOKENS, cache.shape[1]
        )
        rows_KC = paged[near].flatten(0, 1)[:end].float()
        weights_HK = (q_HC.float() @ rows_KC.t() * scale).softmax(dim=1)
        return (weights_HK @ rows_KC[:, : self._rank]).to(q_HC.dtype)

    def gather(self, layer: int, cache: Tensor, pages: list[int], length: int) -> Tensor:
        """Raises LookupError: a prompt piece reads every row, and old ones are not there."""
        raise LookupError("a prompt cannot do without old pages")
