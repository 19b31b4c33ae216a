"""The batch of one step: what the engine plans, and the tensors that the model reads of it.

Rows are tokens. Decode spans come first, one row each (rows 0..D-1); prefill spans follow.
A span never mixes the two: prompt tokens always take the prefill path and generated tokens the
decode path, which is what makes a replay after preemption bit-exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from expertmesh.kernels.mla.types import NO_TAIL, MlaSpan

PAGE_TOKENS = 64
NO_SLOT = -1
NO_PAGE = -1


class Context(Protocol):
    """Old pages of a sequence that are not on the device, as its MLA layers read them
    (state/offload). H heads, C = R + r.

    layer: number among the MLA layers. cache: that layer's rows [P * 64, C]. pages: the sequence's
    page numbers in order, NO_PAGE where a page is not on the device. length: tokens of the context,
    those of this step included; their rows are in the cache.
    """

    def decode(
        self, layer: int, q_HC: Tensor, cache: Tensor, pages: list[int], length: int, scale: float
    ) -> Tensor:
        """The attended latent [H, R] of one absorbed query, in its dtype."""
        ...

    def gather(self, layer: int, cache: Tensor, pages: list[int], length: int) -> Tensor:
        """All rows of the context in order, [n * 64, C], exact; those behind `length` mean nothing.
        Valid until the next call for any context."""
        ...


def prompt_tail(length: int) -> int:
    """Where the last, incomplete page of a prompt of `length` tokens begins: a Span's `tail`.

    What the cache shares of a prompt is whole pages, so a hit leaves at least the tokens behind
    this position to compute, and at least these take the form that is fast for few. Not the rows
    that are in fact left: whether a prompt hits, and how it is cut, must not be seen in its bits.
    """
    return length // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in this step.

    slot: the sequence's KDA state slot. row: its first row in the batch. length: tokens.
    position: absolute position of the first token. pages: the sequence's page numbers, enough
    to cover position + length tokens. decode: a single generated token. saves: (position, snapshot
    slot) in ascending order: what the state is there, behind position and on the 64-token grid, is
    copied to that snapshot while the span is computed; prompt spans only. context: where pages are
    NO_PAGE, who has them. tail: prompt_tail of the whole prompt, whichever part of it this is.
    """

    slot: int
    row: int
    length: int
    position: int
    pages: list[int]
    decode: bool
    saves: tuple[tuple[int, int], ...] = ()
    context: Context | None = None
    tail: int = NO_TAIL

    def cache_rows(self) -> np.ndarray:
        """Rows of the flat latent cache these tokens are written to, int64 [length]."""
        positions = np.arange(self.position, self.position + self.length)
        pages = np.asarray(self.pages, dtype=np.int64)[positions // PAGE_TOKENS]
        return pages * PAGE_TOKENS + positions % PAGE_TOKENS


@dataclass(frozen=True)
class Batch:
    """token_ids_T: int64 [T]. logit_rows_R: int64 [R], the rows whose logits are wanted."""

    token_ids_T: Tensor
    spans: list[Span]
    logit_rows_R: Tensor

    @property
    def rows(self) -> int:
        return self.token_ids_T.shape[0]

    @cached_property
    def decode_spans(self) -> list[Span]:
        return [span for span in self.spans if span.decode]

    @cached_property
    def prefill_spans(self) -> list[Span]:
        return [span for span in self.spans if not span.decode]

    @property
    def is_decode(self) -> bool:
        """Nothing but decode rows, and at least one."""
        return bool(self.spans) and self.spans[-1].decode

    @property
    def most_pages(self) -> int:
        """Pages of the longest decode row, but for what a Context reads."""
        return max(
            (1 if span.context else _used(span) for span in self.decode_spans),
            default=0,
        )

    @property
    def has_context(self) -> bool:
        return any(span.context is not None for span in self.spans)

    def words(self, rows: int, decode: int, pages: int, spare_row: int) -> "Words":
        """Every index of the batch in one array, padded to `rows` rows, `decode` of them decode
        rows with `pages` entries in the page table. A padding row has token 0, no slot, no
        context, and writes its latents to `spare_row` of the cache.

        A padding entry of the table repeats the row's page 0 and is masked by its length. A row
        whose context is read elsewhere has length 0.
        """
        prefill = [span for span in self.prefill_spans if span.context is None]
        sizes = [rows, rows, decode, decode, decode * pages, len(self.logit_rows_R)]
        sizes += [len(span.pages) for span in prefill]
        ends = np.cumsum(sizes)
        flat = np.empty(int(ends[-1]), np.int64)
        tokens, cache_rows, slots, lengths, table, logit_rows, *lists = np.split(flat, ends[:-1])
        own, spans = self.rows, self.decode_spans
        tokens[:own], tokens[own:] = self.token_ids_T.numpy(), 0
        cache_rows[own:] = spare_row
        if self.prefill_spans:
            np.concatenate(
                [span.cache_rows() for span in self.prefill_spans],
                out=cache_rows[len(spans) : own],
            )
        slots[len(spans) :], lengths[len(spans) :] = NO_SLOT, 0
        table_DN = table.reshape(decode, pages)
        table_DN[len(spans) :] = 0
        for row, span in enumerate(spans):
            used = _used(span)
            slots[row], lengths[row] = span.slot, span.position + 1
            cache_rows[row] = span.pages[used - 1] * PAGE_TOKENS + span.position % PAGE_TOKENS
            if span.context is not None:
                lengths[row], table_DN[row] = 0, 0
                continue
            table_DN[row, :used] = span.pages[:used]
            table_DN[row, used:] = span.pages[0]
        logit_rows[:] = self.logit_rows_R.numpy()
        for entries, span in zip(lists, prefill, strict=True):
            entries[:] = span.pages
        return Words(flat, sizes, decode)

    def split(self) -> tuple["Batch", "Batch"] | None:
        """Two halves with about as many rows each, for two micro-batches in flight.

        Returns None when there is nothing to split. Spans stay whole: a row's bits must not
        depend on where the cut falls.
        """
        half, taken = self.rows // 2, 0
        for count, span in enumerate(self.spans):
            if taken >= half and count:
                break
            taken += span.length
        else:
            return None
        wanted = self.logit_rows_R
        left = Batch(self.token_ids_T[:taken], self.spans[:count], wanted[wanted < taken])
        right_spans = [replace(s, row=s.row - taken) for s in self.spans[count:]]
        right = Batch(self.token_ids_T[taken:], right_spans, wanted[wanted >= taken] - taken)
        return left, right


def kda_pieces(
    prefill: Sequence[Span],
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int]]]:
    """Prompt spans cut where their state is saved, as (slot, first row, end row, position), and the
    saves as (number of the piece that they follow, snapshot slot). Cuts on the grid change no
    bits."""
    pieces: list[tuple[int, int, int, int]] = []
    saves: list[tuple[int, int]] = []
    for span in prefill:
        row, begin, end = span.row - span.position, span.position, span.position + span.length
        for stop, saved in span.saves:
            pieces.append((span.slot, row + begin, row + stop, begin))
            saves.append((len(pieces) - 1, saved))
            begin = stop
        if begin < end:
            pieces.append((span.slot, row + begin, row + end, begin))
    return pieces, saves


def _used(span: Span) -> int:
    return span.position // PAGE_TOKENS + 1


@dataclass(frozen=True, slots=True)
class Words:
    """A batch as one int64 array, its parts back to back. sizes: of the parts, in order."""

    flat: np.ndarray
    sizes: list[int]
    decode: int

    @property
    def fixed(self) -> int:
        """How many come first whose number depends on the padded sizes alone: all but the wanted
        logits and the prompts' pages."""
        return sum(self.sizes[:5])

    def inputs(self, words: Tensor, spans: Sequence[Span] = ()) -> "Inputs":
        """The parts of `words`, which holds this array on some device. spans: of the batch."""
        prefill = [span for span in spans if not span.decode]
        parts: tuple[Tensor, ...] = torch.split(words, self.sizes)  # type: ignore[no-untyped-call]
        tokens, cache_rows, slots, lengths, table, logit_rows, *pages = parts
        return Inputs(
            tokens,
            cache_rows,
            slots,
            lengths,
            table.view(self.decode, -1) if self.decode else table.view(0, 0),
            logit_rows,
            *kda_pieces(prefill),
            [
                MlaSpan(s.row, s.row + s.length, s.position, listed, s.tail)
                for s, listed in zip(
                    (span for span in prefill if span.context is None), pages, strict=True
                )
            ],
            [
                ContextRows(
                    s.row, s.row + s.length, s.position, s.pages, s.context, s.decode, s.tail
                )
                for s in spans
                if s.context is not None
            ],
        )


class ContextRows(NamedTuple):
    """Rows [begin, end) of the batch, at positions position, position + 1, ..., whose old pages a
    Context has. tail: see Span."""

    begin: int
    end: int
    position: int
    pages: list[int]
    context: Context
    decode: bool
    tail: int

    @property
    def length(self) -> int:
        """Tokens of the context, these included."""
        return self.position + self.end - self.begin


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the model reads of a batch, on its device; all int64. T rows, the first D of them decode
    rows, R rows whose logits are wanted, N pages of the longest decode row.

    cache_rows_T: where a row's latents are written. lengths_D: context of a decode row, the new
    token included. kda_spans, kda_saves: the prompt pieces and what follows them, see kda_pieces.
    contexts: rows that neither the page table nor mla_spans cover.
    """

    token_ids_T: Tensor
    cache_rows_T: Tensor
    slots_D: Tensor
    lengths_D: Tensor
    page_table_DN: Tensor
    logit_rows_R: Tensor
    kda_spans: list[tuple[int, int, int, int]]
    kda_saves: list[tuple[int, int]]
    mla_spans: list[MlaSpan]
    contexts: list[ContextRows]

    @property
    def rows(self) -> int:
        return self.token_ids_T.shape[0]

    @property
    def decode(self) -> int:
        return self.slots_D.shape[0]
