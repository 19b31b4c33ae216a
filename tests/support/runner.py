"""Drives a Model without an engine: one sequence per slot, any chunking. For model tests."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import Exchange, LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.batch import PAGE_TOKENS, Batch, Span, prompt_tail
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import load_config
from expertmesh.actors.model.model import Model, RoutingTrace
from expertmesh.kernels.registry import Kernels, load_kernels


def split_experts(count: int, actors: int) -> list[list[int]]:
    """Contiguous, uneven where it must be."""
    cuts = [count * a // actors for a in range(actors + 1)]
    return [list(range(cuts[a], cuts[a + 1])) for a in range(actors)]


class Runner:
    """A float32 model with `slots` sequences of up to `pages_each` pages."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 4,
        pages_each: int = 4,
        banks: int = 1,
        backend: str = "auto",
        cache_bytes: int = 1 << 30,
        kernels: Kernels | None = None,
    ) -> None:
        self.config = load_config(folder)
        self.kernels = kernels or load_kernels(backend)
        source = Checkpoint.open(folder, self.config)
        self.model = Model(self.config, self.kernels, source)
        self.banks = [
            ExpertBank(
                self.config,
                self.kernels,
                dict.fromkeys(self.config.moe_layers, ids),
                source,
                dtype=torch.float32,
                cache_bytes=cache_bytes,
            )
            for ids in split_experts(self.config.num_experts, banks)
        ]
        self.exchange: Exchange = LocalExchange(*self.banks)
        self.state = self.model.new_state(slots * pages_each, slots)
        self.pages = [list(range(s * pages_each, (s + 1) * pages_each)) for s in range(slots)]
        self.length = [0] * slots

    def reset(self, slot: int) -> None:
        self.state.zero_slot(slot)
        self.length[slot] = 0

    def step(
        self,
        work: Sequence[tuple[int, list[int], bool]],
        trace: RoutingTrace | None = None,
        *,
        ping_pong: bool = False,
        prompt: int | None = None,
    ) -> Tensor:
        """work: (slot, token ids, is decode), decodes first. prompt: length of the prompt that a
        piece is of; without it each is the last of one. Logits of every row, fp32 [T, V]."""
        spans, ids = [], []
        for slot, tokens, decode in work:
            start = self.length[slot]
            needed = -(-(start + len(tokens)) // PAGE_TOKENS)
            pages, tail = self.pages[slot][:needed], prompt_tail(prompt or start + len(tokens))
            spans.append(Span(slot, len(ids), len(tokens), start, pages, decode, tail=tail))
            ids += tokens
            self.length[slot] += len(tokens)
        batch = Batch(torch.tensor(ids), spans, torch.arange(len(ids)))
        return self.model.forward(batch, self.state, self.exchange, trace, ping_pong=ping_pong)

    def prefill(self, slot: int, ids: list[int], chunk: int = 1 << 30) -> Tensor:
        """Logits of every prompt row, prefilled in pieces of `chunk` tokens."""
        end = self.length[slot] + len(ids)
        rows = [
            self.step([(slot, ids[i : i + chunk], False)], prompt=end)
            for i in range(0, len(ids), chunk)
        ]
        return torch.cat(rows)

    def greedy(self, slot: int, last_logits_V: Tensor, count: int) -> list[int]:
        """`count` ids; the first is the argmax of the prompt's last row."""
        out = [int(last_logits_V.argmax())]
        while len(out) < count:
            out.append(int(self.step([(slot, [out[-1]], True)])[0].argmax()))
        return out
