"""A model without weights whose next token is a function of the sequence's own state.

Its recurrent state is one number per slot, mixed with every token, position and path (prefill or
decode); its cache holds one number per token in the pages. So each of the scheduler's possible
mistakes changes the text or raises: a slot that was not zeroed or is shared, a page that is
shared, a token computed twice or skipped, a replay through the wrong path, and a prompt cut
outside the grid (which in the real model costs bits).
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS, Batch, Span
from expertmesh.actors.model.model import RoutingTrace
from expertmesh.kernels.sampling.torch_ops import counter_uniform, log_probs, sample

MASK = 2**63 - 1


def mix(value: int, *words: int) -> int:
    for word in words:
        value = ((value ^ (word + 0x9E3779B9)) * 0x2545F4914F6CDD1D + 0x632BE5AB) & MASK
        value ^= value >> 29
    return value


class FakeState:
    """accumulator and count per slot, one cell per token in the pages. Starts poisoned."""

    def __init__(self, pages: int, slots: int) -> None:
        self.pages, self.slots = pages, slots
        self.accumulator = [-7] * slots
        self.count = [-7] * slots
        self.cells = np.full(pages * PAGE_TOKENS, -7, dtype=np.int64)
        self.latents = torch.ones(1, pages * PAGE_TOKENS, 1)
        self.page_bytes, self.slot_bytes = PAGE_TOKENS * self.latents.itemsize, 16

    def zero_slot(self, slot: int) -> None:
        self.accumulator[slot] = self.count[slot] = 0


@dataclass
class FakeModel:
    """vocab: ids 0..vocab-1.

    fail_at: forward raises in that call (from 1). nan_tokens: as input they give NaN.
    check_cache: re-read every sequence's whole cache at each token (off for timing).
    """

    vocab: int = 97
    max_position: int = 4096
    fail_at: int | None = None
    nan_tokens: frozenset[int] = frozenset()
    check_cache: bool = True
    calls: int = 0
    batches: list[Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.config = SimpleNamespace(vocab_size=self.vocab, max_position=self.max_position)
        self.kernels = SimpleNamespace(
            sample=sample, log_probs=log_probs, counter_uniform=counter_uniform
        )
        self._keys_V = (np.arange(self.vocab, dtype=np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)

    def new_state(self, pages: int, slots: int) -> FakeState:
        return FakeState(pages, slots)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        state: FakeState,
        exchange: Any,
        trace: RoutingTrace | None = None,
        *,
        ping_pong: bool = False,
    ) -> Tensor:
        self.calls += 1
        self.batches.append(batch)
        del self.batches[:-8]
        if self.calls == self.fail_at:
            raise RuntimeError("the fake exchange broke")
        ids = batch.token_ids_T.tolist()
        seen_slots: set[int] = set()
        after = [0] * len(ids)
        row = 0
        for number, span in enumerate(batch.spans):
            assert span.row == row, "spans must cover the rows in order"
            assert span.slot not in seen_slots, f"slot {span.slot} twice in one batch"
            assert not span.decode or (span.length == 1 and row == number), "decode spans first"
            assert span.length > 0
            seen_slots.add(span.slot)
            self._span(span, ids[row : row + span.length], state, after)
            row += span.length
        assert row == len(ids)
        if trace is not None:
            after_T = torch.tensor(after, dtype=torch.int64)
            trace.layers = {1: (after_T % 8).unsqueeze(1), 2: (after_T % 5).unsqueeze(1)}
        rows = batch.logit_rows_R.tolist()
        assert rows == sorted(set(rows)), "logits rows must ascend"
        seeds_R1 = np.array([after[r] for r in rows], dtype=np.uint64).reshape(-1, 1)
        noise_RV = (seeds_R1 * self._keys_V) >> np.uint64(40)
        logits_RV = torch.from_numpy(noise_RV.astype(np.float32) * (6.0 / 2**24) - 3.0)
        for i, r in enumerate(rows):
            if ids[r] in self.nan_tokens:
                logits_RV[i] = torch.nan
        return logits_RV

    def _span(self, span: Span, ids: list[int], state: FakeState, after: list[int]) -> None:
        slot, value = span.slot, state.accumulator[span.slot]
        assert state.count[slot] == span.position, (
            f"slot {slot} holds {state.count[slot]} tokens, the span starts at {span.position}"
        )
        for i, token in enumerate(ids):
            at = span.position + i
            value = mix(value, token, at, int(span.decode))
            state.cells[span.pages[at // PAGE_TOKENS] * PAGE_TOKENS + at % PAGE_TOKENS] = value
            after[span.row + i] = value
        end = span.position + len(ids)
        if not span.decode and end % PAGE_TOKENS:
            value = mix(value, end)  # cuts on the 64 grid cost nothing, all others are felt
        state.accumulator[slot], state.count[slot] = value, end
        if self.check_cache:
            cells = state.cells.reshape(-1, PAGE_TOKENS)[span.pages].reshape(-1)[:end]
            digest = int(cells.view(np.uint64).sum(dtype=np.uint64)) & MASK
            after[span.row + len(ids) - 1] = mix(value, digest)
