"""A model that reads a text while everything behind it turns into what a codec gives back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.batch import PAGE_TOKENS, Batch, Span
from expertmesh.actors.model.layers import Mla
from expertmesh.actors.model.loading import Dtype, LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.actors.state.pages import pages_for
from expertmesh.deploy.bench.codec_estimates import Estimate
from expertmesh.deploy.eval.cases import Case, Probe
from expertmesh.deploy.exit_codes import ExitCode, Refused

SINKS = 1  # pages that stay exact
_PROBE_PAGES, _PROBES = 4, 32
_EXPERT_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Queries:
    """Of one MLA layer, in absorbed form: q_nh [n, H, R + r] fp32 of the last step."""

    q_NHC: Tensor
    w_v_HvR: Tensor
    scale: float


class Verdict(NamedTuple):
    """right: greedy decoding gives the answer. nats: of its tokens."""

    right: bool
    nats: float


class CodecReader:
    """One sequence at a time, and probes that go on from it. The recurrent state stays exact."""

    def __init__(self, folder: Path, dtype: Dtype, tokens: int) -> None:
        """tokens: most that a text may have. Raises Refused for a checkpoint without tokenizer."""
        opened = LoadSettings(model=folder, dtype=dtype, device="cpu").open()
        config = opened.config
        tokenizer = Tokenizer.load(folder, config)
        if tokenizer is None:
            raise Refused(ExitCode.NO_MODEL, f"{folder.name} has no tokenizer")
        self.tokenizer, self.config, self.dtype = tokenizer, config, opened.dtype
        self._model = Model(config, opened.kernels, opened.source, dtype=opened.dtype)
        everywhere = dict.fromkeys(config.moe_layers, range(config.num_experts))
        bank = ExpertBank(
            config, opened.kernels, everywhere, opened.source,
            dtype=opened.dtype, cache_bytes=_EXPERT_BYTES,
        )  # fmt: skip
        self._exchange = LocalExchange(bank)
        self._pages = pages_for(tokens)
        self._state = self._model.new_state(self._pages + _PROBES * _PROBE_PAGES, 1 + _PROBES)
        self.latents = self._state.latents
        self._taken: dict[int, tuple[Tensor, Tensor]] = {}
        for at, layer in enumerate(self._mla):
            layer.kernels = replace(layer.kernels, mla_prefill=self._tap(at, layer))

    @property
    def _mla(self) -> list[Mla]:
        return [layer for layer in self._model.attention if isinstance(layer, Mla)]

    def _tap(self, at: int, layer: Mla) -> Any:
        prefill = layer.kernels.mla_prefill

        def taking(q_n: Tensor, q_r: Tensor, *rest: Any) -> Tensor:
            self._taken[at] = q_n, q_r
            return prefill(q_n, q_r, *rest)

        return taking

    def read(self, ids: Sequence[int], estimate: Estimate, step: int = PAGE_TOKENS) -> None:
        """Reads `ids` from the beginning, `step` tokens at a time; whole pages behind a step but
        the first are then replaced."""
        for _ in self.log_probs(ids, estimate, step):
            pass

    def log_probs(
        self, ids: Sequence[int], estimate: Estimate, step: int = PAGE_TOKENS
    ) -> Iterator[Tensor]:
        """`read`, with log probabilities fp32 [step, V] of what comes after each token."""
        self._state.zero_slot(0)
        for begin in range(0, len(ids), step):
            piece = list(ids[begin : begin + step])
            span = Span(0, 0, len(piece), begin, list(range(self._pages)), False)
            yield self._forward(piece, [span], list(range(len(piece)))).log_softmax(-1)
            self._replace(begin, begin + len(piece), estimate)

    def ask(self, case: Case) -> list[Verdict]:
        """Of each probe's answers, after `read` of the context."""
        verdicts: list[Verdict] = []
        for begin in range(0, len(case.probes), _PROBES):
            verdicts += self._ask(len(case.context), case.probes[begin : begin + _PROBES])
        return verdicts

    def queries(self) -> list[Queries]:
        """Of the last step of `read`, per MLA layer."""
        found = []
        for at, layer in enumerate(self._mla):
            q_n, q_r = self._taken[at]
            absorbed = torch.einsum("nhd,hdr->nhr", q_n.float(), layer.w_k_HdR.float())
            q_NHC = torch.cat([absorbed, q_r.float()], dim=-1)
            found.append(Queries(q_NHC, layer.w_v_HvR.float(), layer.scale))
        return found

    def snapshot(self) -> tuple[Tensor, Tensor]:
        """Copies of the recurrent state behind the last token read, as a snapshot's parts."""
        return self._state.kda[:, 0].clone(), self._state.conv[:, 0].clone()

    def _forward(self, ids: list[int], spans: list[Span], rows: list[int]) -> Tensor:
        batch = Batch(torch.tensor(ids), spans, torch.tensor(rows))
        return self._model.forward(batch, self._state, self._exchange)

    def _replace(self, begin: int, end: int, estimate: Estimate) -> None:
        first = max(begin // PAGE_TOKENS, SINKS)
        for page in range(first, end // PAGE_TOKENS):
            rows = self.latents[:, page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
            rows.copy_(estimate.of(rows).latents)

    def _ask(self, position: int, probes: Sequence[Probe]) -> list[Verdict]:
        """All in one step, each with a copy of the state and of the page that is not full."""
        shared, partial = divmod(position, PAGE_TOKENS)
        ids: list[int] = []
        spans: list[Span] = []
        wanted: list[list[int]] = []  # rows of each probe that predict its answers
        for at, probe in enumerate(probes, 1):
            own = self._pages + (at - 1) * _PROBE_PAGES
            into, out = own * PAGE_TOKENS, shared * PAGE_TOKENS
            self.latents[:, into : into + partial] = self.latents[:, out : out + partial]
            for state in (self._state.kda, self._state.conv):
                state[:, at] = state[:, 0]
            pages = [*range(shared), *range(own, own + _PROBE_PAGES)]
            spans.append(Span(at, len(ids), len(probe.ids), position, pages, False))
            wanted.append([len(ids) + i - 1 for pair in probe.spans for i in range(*pair)])
            ids += probe.ids
        rows = list(chain.from_iterable(wanted))
        logits = self._forward(ids, spans, rows)
        targets = torch.tensor([ids[row + 1] for row in rows])
        counts = [len(own) for own in wanted]
        right = torch.split_with_sizes(logits.argmax(-1) == targets, counts)
        nats = -logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        lost = torch.split_with_sizes(nats.double(), counts)
        return [Verdict(bool(r.all()), float(n.sum())) for r, n in zip(right, lost, strict=True)]
