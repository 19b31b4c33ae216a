"""The batch of one step: what the engine plans and the model runs.

Rows are tokens. Decode spans come first, one row each (rows 0..D-1); prefill spans follow.
A span never mixes the two: prompt tokens always take the prefill path and generated tokens the
decode path, which is what makes a replay after preemption bit-exact.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from expertmesh.kernels.mla.plan import DecodePlan, plan_decode

PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in this step.

    slot: the sequence's KDA state slot. row: its first row in the batch. length: tokens.
    position: absolute position of the first token. pages: the sequence's page numbers, enough
    to cover position + length tokens. decode: a single generated token.
    """

    slot: int
    row: int
    length: int
    position: int
    pages: list[int]
    decode: bool

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

    @cached_property
    def cache_rows_T(self) -> Tensor:
        if not self.spans:  # a replica that joins a step without work
            return torch.empty(0, dtype=torch.int64)
        return torch.from_numpy(np.concatenate([span.cache_rows() for span in self.spans]))

    @cached_property
    def slots_D(self) -> Tensor:
        return torch.tensor([span.slot for span in self.decode_spans], dtype=torch.int64)

    @cached_property
    def lengths_D(self) -> Tensor:
        """Context length of each decode row, the new token included."""
        return torch.tensor([span.position + 1 for span in self.decode_spans], dtype=torch.int64)

    @cached_property
    def page_table_DN(self) -> Tensor:
        """Pages of each decode row; padding repeats page 0 of the row and is masked by length."""
        used = [span.position // PAGE_TOKENS + 1 for span in self.decode_spans]
        table = np.empty((len(used), max(used, default=0)), dtype=np.int64)
        for row, (count, span) in enumerate(zip(used, self.decode_spans, strict=True)):
            table[row, :count] = span.pages[:count]
            table[row, count:] = span.pages[0]
        return torch.from_numpy(table)

    @cached_property
    def decode_plan(self) -> DecodePlan:
        """Which cache rows the decode spans read: worked out once for all MLA layers."""
        return plan_decode(self.page_table_DN, self.lengths_D)

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
        right_spans = [
            Span(s.slot, s.row - taken, s.length, s.position, s.pages, s.decode)
            for s in self.spans[count:]
        ]
        right = Batch(self.token_ids_T[taken:], right_spans, wanted[wanted >= taken] - taken)
        return left, right
