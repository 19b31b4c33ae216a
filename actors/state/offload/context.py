"""A running sequence whose old pages are not on the device (kv-state 3.0, 3.4, 3.5).

Sinks and the last window stay; pages between them move to host memory, one by one, as the window
passes, and where that is short the oldest on to disk. `offload` copies them back for every step
that reads them: the same kernels on the same rows, hence the same bits. `select` does so for
prompts; a generated token's query scores all old tokens by their sketch, reads the pages that
matter exactly, and takes the others by estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

import torch
from cachetools import LRUCache
from torch import Tensor

from expertmesh.actors.model.batch import NO_PAGE, PAGE_TOKENS
from expertmesh.actors.state.offload.base_rows import BaseRows
from expertmesh.actors.state.offload.basis import fit_basis
from expertmesh.actors.state.offload.index import SketchIndex
from expertmesh.actors.state.offload.selection import Query, select_by_sketch, select_certified
from expertmesh.actors.state.offload.spill import Lost, Spill, SpillFile
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.store import Layered, fill_layer

Mode = Literal["offload", "select"]
# Rows that a sketch is fitted to: the first of the context that leave, whatever the chunks, so that
# the same text has the same sketch. Until so many have left, all are read.
FIT_PAGES = 32
# Codecs of the tiers below that leave a base and a refinement: estimates are then made from such a
# base in host memory, whose error has a bound.
BASE_BITS = {"int8": 8, "int4": 4}


def far_pages(settings: StateSettings, computed: int) -> int:
    """Pages that have left the device when so many tokens are computed."""
    behind = (computed - settings.window_tokens) // PAGE_TOKENS
    return max(0, behind - settings.sink_tokens // PAGE_TOKENS)


class Source(Layered, Protocol):
    """A page off the device, of one part with rows [64, C] in each layer. nbytes: in host memory.
    `layer` raises Lost where it is on disk and cannot be had."""

    @property
    def nbytes(self) -> int: ...


class HostPage:
    """rows [L, 64, C], as they were: a running sequence reads them again and again."""

    def __init__(self, rows: Tensor) -> None:
        self._rows, self.nbytes = rows, rows.nbytes

    def layer(self, part: int, index: int, out: Tensor) -> None:
        out.copy_(self._rows[index], non_blocking=True)


@dataclass(slots=True)
class Reading:
    """Counted over steps and layers. estimated_share: the largest share of one head's weight that
    fell on estimates, in any step. bound: the largest that is proven on the relative error of a
    head's output, infinity where some have none. bits: per value, of what estimates are made from.
    """

    read_pages: int = 0
    loaded_pages: int = 0  # of those read, not still on the device from an earlier step
    estimated_pages: int = 0
    estimated_share: float = 0.0
    bound: float = 0.0
    bits: float = 0.0


class Scratch:
    """Rows that are gathered for one layer of one sequence: memory that is used over and over."""

    def __init__(self) -> None:
        self._rows: Tensor | None = None
        self._used = False

    def take(self, rows: int, like: Tensor) -> Tensor:
        """[rows, C], of undefined content."""
        self._used = True
        if self._rows is None or self._rows.shape[0] < rows:
            self._rows = like.new_zeros(rows + rows // 4, like.shape[1])
        return self._rows[:rows]

    def rest(self) -> None:
        """A step has ended: what it did not use is freed."""
        if not self._used:
            self._rows = None
        self._used = False

    @property
    def nbytes(self) -> int:
        return 0 if self._rows is None else self._rows.nbytes


class Offload:
    """What contexts of one model share.

    rank: R. mla_decode: of the model's kernels. moments: of the absorbed queries of each MLA layer
    [C, C] (Mla.query_moment), or None. spill: the disk below host memory. total: of all contexts
    there were.
    """

    def __init__(
        self,
        settings: StateSettings,
        rank: int,
        scale: float,
        mla_decode: Callable[..., Tensor],
        moments: Callable[[], Sequence[Tensor]] | None = None,
        fit_pages: int = FIT_PAGES,
        spill: Spill | None = None,
    ) -> None:
        self.settings, self.rank, self.scale, self.spill = settings, rank, scale, spill
        self.mla_decode, self.moments = mla_decode, moments
        self.fit_pages, self.scratch, self.total = fit_pages, Scratch(), Reading()

    @property
    def spill_usable(self) -> bool:
        """Whether there is a disk that has not failed lately."""
        return self.spill is not None and self.spill.usable

    def context(self, mode: Mode) -> "OffloadedContext":
        return OffloadedContext(self, mode)


class OffloadedContext:
    """Which pages are where, of one sequence. A Context of the model's MLA layers.

    disk: whether some may be there. lost: why the present step computes nothing that can be used,
    and the sequence must begin again; "": it is sound.
    """

    def __init__(self, shared: Offload, mode: Mode, disk: bool = True) -> None:
        self.mode: Mode = mode
        self.reading = Reading()
        self.disk, self.lost = disk and shared.spill is not None, ""
        self._shared = shared
        self._first = shared.settings.sink_tokens // PAGE_TOKENS
        self._cold: list[Source] = []
        self._cold_bytes = 0
        self._file: SpillFile | None = None
        self._pieces = self._spilled = 0  # that should be, and are on disk: of the first cold pages
        self._indexes: list[SketchIndex | BaseRows] = []
        self._recent: list[LRUCache[int, Tensor]] = []

    def again(self) -> "OffloadedContext":
        """For the same sequence from its beginning, with what was counted so far, and without a
        disk that has lost something. This one is of no use any more."""
        fresh = OffloadedContext(self._shared, self.mode, self.disk and not self.lost)
        fresh.reading = self.reading
        self._cold = []
        if self._file is not None:
            last, self._file = [self._file], None
            SpillFile.discard(last)
        return fresh

    # --- which pages are where ------------------------------------------------------------------

    @property
    def cold_pages(self) -> int:
        """How many are not on the device."""
        return len(self._cold)

    def leaving(self, computed: int) -> range:
        """Pages that need not be on the device any more when so many tokens are computed."""
        begin = self._first + len(self._cold)
        end = self._first + far_pages(self._shared.settings, computed)
        return range(begin, max(begin, end))

    def leave(self, caches: Tensor, pages: list[int], computed: int) -> list[int]:
        """Takes pages off the device; returns their numbers, which are NO_PAGE in `pages` from now
        on. caches: [L, rows, C], complete up to `computed` tokens. Waits for the device."""
        gone = []
        for at in self.leaving(computed):
            rows = slice(pages[at] * PAGE_TOKENS, (pages[at] + 1) * PAGE_TOKENS)
            self.take(caches[:, rows])
            gone.append(pages[at])
            pages[at] = NO_PAGE
        return gone

    def take(self, rows_L64C: Tensor) -> None:
        """The next page in order, which is going to leave the device, is copied."""
        self._cold.append(HostPage(_to_host(rows_L64C)))
        self._cold_bytes += self._cold[-1].nbytes
        if self.mode == "select":
            self._index(rows_L64C)
        self.settle(self._pieces)

    def settle(self, pieces: int) -> None:
        """The first so many pieces of old pages go to disk, now or as soon as they are whole."""
        self._pieces, size = pieces, self._shared.settings.offload_disk_pages
        while not self.lost and self._spilled < min(pieces, len(self._cold) // size):
            begin, end = self._spilled * size, (self._spilled + 1) * size
            if self._file is None:
                assert self._shared.spill is not None
                self._file = SpillFile(self._shared.spill)
            going = self._cold[begin:end]
            try:
                self._cold[begin:end] = self._file.write(going)
            except Lost as error:  # they are not, but there is no room for them
                self.lost = error.reason
            else:
                self._cold_bytes -= sum(page.nbytes for page in going)
                self._spilled += 1

    def _index(self, rows_L64C: Tensor) -> None:
        if not self._indexes and len(self._cold) == self._shared.fit_pages:
            self._start_indexes(rows_L64C)
        else:
            for index, rows in zip(self._indexes, rows_L64C, strict=bool(self._indexes)):
                index.add(rows)

    def _start_indexes(self, like: Tensor) -> None:
        shared, (layers, *page) = self._shared, like.shape
        self._recent = [LRUCache(shared.settings.select_pages) for _ in range(layers)]
        for layer in range(layers):
            rows = like.new_empty(len(self._cold), *page)
            self._fill(self._cold, layer, rows, range(len(rows)))
            index = self._new_index(layer, rows)
            for one in rows:
                index.add(one)
            self._indexes.append(index)
            self.reading.bits = index.bits

    def _new_index(self, layer: int, rows_N64C: Tensor) -> SketchIndex | BaseRows:
        shared = self._shared
        bits = BASE_BITS.get(shared.settings.codec)
        if bits is not None:
            return BaseRows(bits, rows_N64C.shape[-1], rows_N64C.device)
        moment = None if shared.moments is None else shared.moments()[layer]
        basis = fit_basis(rows_N64C.flatten(0, 1), moment, shared.rank, shared.scale)
        return SketchIndex(basis)

    # --- as MLA reads it ------------------------------------------------------------------------

    def gather(self, layer: int, cache: Tensor, pages: list[int], length: int) -> Tensor:
        used = -(-length // PAGE_TOKENS)
        out = self._shared.scratch.take(used * PAGE_TOKENS, cache)
        paged = out.view(used, PAGE_TOKENS, -1)
        first, end = self._first, self._first + len(self._cold)
        for begin, stop in ((0, min(first, used)), (end, used)):
            if begin < stop:
                self._hot(cache, pages[begin:stop], paged[begin:stop])
        old = self._cold[: max(0, used - first)]
        self._fill(old, layer, paged, range(first, first + len(old)))
        return out

    def _fill(self, pages: Sequence[Source], layer: int, out: Tensor, rows: Sequence[int]) -> None:
        """Old pages into out[rows[i]]. Where they are lost the step goes on with zeros, for other
        sequences and other ranks are in it."""
        if not self.lost:
            try:
                fill_layer(pages, 0, layer, out, rows)
            except Lost as error:
                self.lost = error.reason
        if self.lost:
            for row in rows:
                out[row].zero_()

    def decode(
        self, layer: int, q_HC: Tensor, cache: Tensor, pages: list[int], length: int, scale: float
    ) -> Tensor:
        if self._indexes:
            found = self._select(layer, q_HC, cache, pages, length, scale)
            if found is not None:
                return found
        rank, rows = self._shared.rank, self.gather(layer, cache, pages, length)
        table = torch.arange(rows.shape[0] // PAGE_TOKENS, device=cache.device).unsqueeze(0)
        lengths = torch.tensor([length], device=cache.device)
        q_1HC = q_HC.unsqueeze(0)
        out_1HR: Tensor = self._shared.mla_decode(
            q_1HC[..., :rank], q_1HC[..., rank:], rows, table, lengths, scale
        )
        self.reading.loaded_pages += len(self._cold)
        self._count(len(self._cold), 0, 0.0, 0.0)
        return out_1HR[0]

    def _select(
        self, layer: int, q_HC: Tensor, cache: Tensor, pages: list[int], length: int, scale: float
    ) -> Tensor | None:
        """None where what is proven is not enough."""
        index, settings, q = self._indexes[layer], self._shared.settings, q_HC.float()
        hot_KC = self._hot_rows(cache, pages, length)
        read = partial(self._read, layer, cache)
        query = Query(q, hot_KC, q @ hot_KC.t() * scale, scale, self._shared.rank, read)
        if isinstance(index, BaseRows):
            found = select_certified(index, query, settings)
            if found is None:
                return None
        else:
            found = select_by_sketch(index, query, settings)
        self._count(found.read, index.pages - found.read, found.share, found.bound)
        return found.out_HR.to(q_HC.dtype)

    def _count(self, read: int, estimated: int, share: float, bound: float) -> None:
        for reading in (self.reading, self._shared.total):
            reading.read_pages += read
            reading.estimated_pages += estimated
            reading.estimated_share = max(reading.estimated_share, share)
            reading.bound = max(reading.bound, bound)

    def _read(self, layer: int, cache: Tensor, chosen: list[int]) -> Tensor:
        """Rows of old pages, float32 [n * 64, C]; those of late steps are still on the device."""
        if not chosen:
            return cache.new_empty(0, cache.shape[1], dtype=torch.float32)
        recent, absent = self._recent[layer], list[int]()
        out = cache.new_empty(len(chosen), PAGE_TOKENS, cache.shape[1])
        for row, at in enumerate(chosen):
            if at in recent:
                out[row] = recent[at]
            else:
                absent.append(row)
        self._fill([self._cold[chosen[row]] for row in absent], layer, out, absent)
        for row in absent:
            recent[chosen[row]] = out[row].clone()
        self.reading.loaded_pages += len(absent)
        return out.flatten(0, 1).float()

    def _hot_rows(self, cache: Tensor, pages: list[int], length: int) -> Tensor:
        """Sinks and window, float32 [K, C]."""
        used = -(-length // PAGE_TOKENS)
        hot = pages[: self._first] + pages[self._first + len(self._cold) : used]
        rows = cache.new_empty(len(hot), PAGE_TOKENS, cache.shape[1])
        self._hot(cache, hot, rows)
        behind = used * PAGE_TOKENS - length
        return rows.flatten(0, 1)[: len(hot) * PAGE_TOKENS - behind].float()

    def _hot(self, cache: Tensor, pages: list[int], out: Tensor) -> None:
        numbers = torch.tensor(pages, dtype=torch.int64, device=cache.device)
        paged = cache[: cache.shape[0] // PAGE_TOKENS * PAGE_TOKENS].view(-1, *out.shape[1:])
        torch.index_select(paged, 0, numbers, out=out)

    # --- what it costs --------------------------------------------------------------------------

    @property
    def index_bytes(self) -> int:
        """On the device: sketches and their bases."""
        return sum(one.nbytes for one in self._indexes if isinstance(one, SketchIndex))

    @property
    def recent_bytes(self) -> int:
        """On the device: old pages that late steps have read."""
        return sum(page.nbytes for recent in self._recent for page in recent.values())

    @property
    def scratch_bytes(self) -> int:
        """On the device: rows gathered for a layer, of all sequences together."""
        return self._shared.scratch.nbytes

    @property
    def host_bytes(self) -> int:
        """Old pages, and the bases of estimates. From any thread."""
        bases = sum(one.nbytes for one in self._indexes if isinstance(one, BaseRows))
        return bases + self._cold_bytes


def _to_host(rows: Tensor) -> Tensor:
    if rows.device.type == "cpu":
        return rows.clone()
    return torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows)
