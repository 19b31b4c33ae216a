"""The cache of an engine that keeps nothing: the twin that everything kept is compared with."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.pages import SharedPool
from expertmesh.actors.state.prefix import Owner
from expertmesh.actors.state.stats import CacheStats


class PlainState(Protocol):
    """What an engine needs of a ModelState: its sizes, and an empty slot for a new owner."""

    pages: int
    slots: int
    latents: Tensor

    @property
    def page_bytes(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    def zero_slot(self, slot: int) -> None: ...


class PlainCache:
    """Pages alone. Its methods are those of StateCache."""

    loading = waiting = 0

    def __init__(self, state: PlainState) -> None:
        self._state = state
        self.pages = SharedPool("page", state.pages, lambda page: None)

    def open(self, seq: Owner, tenant: str, mode: str = "exact", tip: object = None) -> None:
        pass

    def reopen(self, seq: Owner) -> None:
        pass

    def attach(self, seq: Owner, first: bool = True) -> int:
        return 0

    def prepare(self, seq: Owner, first: bool) -> None:
        pass

    def detach(self, seq: Owner) -> None:
        pass

    def pages_of(self, seq: Owner, count: int) -> list[int]:
        return self.pages.take(seq.number, count)

    def begin(self, seqs: Sequence[Owner], grown: Sequence[int] = ()) -> None:
        for seq in seqs:
            self._state.zero_slot(seq.slot)

    def saves(self, seq: Owner, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        return ()

    def arrived(self) -> None:
        pass

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        pass

    def commit(self, seq: Owner) -> None:
        if seq.context is not None:
            gone = seq.context.leave(self._state.latents, seq.pages, seq.computed)
            self.pages.give_back(seq.number, gone)

    def close(self, seq: Owner) -> None:
        pass

    def withdraw(self, seq: Owner) -> None:
        latents = self._state.latents
        latents.view(latents.shape[0], self.pages.size, PAGE_TOKENS, -1)[:, seq.near] = 0

    def stats(self) -> CacheStats:
        return CacheStats()
