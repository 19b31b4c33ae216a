"""A text that is read once, and everything that is asked of it: each question goes on from the same
state, as if it alone followed.

The question and its answer are given token by token through the model's decode path, whatever the
model would have said (teacher forcing), many questions in a step. What a row computes does not
depend on its companions.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS, Batch, Span
from expertmesh.actors.state.pages import pages_for
from expertmesh.deploy.eval.cases import Probe
from expertmesh.deploy.eval.reading import Mode, Reader
from expertmesh.deploy.eval.subject import Subject

STEP_TOKENS = 1024
WIDTH = 16  # questions in a step
OWN_PAGES = 4  # of a question and its answer


class Fork:
    """Memory for one text of at most `tokens` tokens, and WIDTH continuations of it. Slot 0 has the
    text's KDA state, the first pages its latents."""

    def __init__(self, subject: Subject, tokens: int) -> None:
        self._subject, self._text_pages, self.length = subject, pages_for(tokens), 0
        pages = self._text_pages + WIDTH * OWN_PAGES
        self._state = subject.new_state(pages, 1 + WIDTH)
        self._last_V = torch.empty(0)

    @property
    def latents(self) -> Tensor:
        """[L, rows, C]: first of the text, then of what is being asked."""
        return self._state.latents

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> None:
        """Forgets the one before. Raises ValueError for a text that there is no room for."""
        if not 0 < len(text) <= self._text_pages * PAGE_TOKENS:
            raise ValueError(f"{len(text)} tokens, there is room for {self._text_pages} pages")
        self._state.zero_slot(0)
        self.length, pages = len(text), list(range(self._text_pages))
        for begin in range(0, len(text), STEP_TOKENS):
            piece = list(text[begin : begin + STEP_TOKENS])
            span = Span(0, 0, len(piece), begin, pages, False)
            batch = Batch(torch.tensor(piece), [span], torch.tensor([len(piece) - 1]))
            self._last_V = self._subject.forward(batch, self._state)[0]

    def reader(self, mode: Mode) -> Reader:
        """Of the text that was read last, until the next is read."""
        return Reader(self._subject, mode, self._state, self.length)

    @torch.inference_mode()
    def ask(self, probes: Sequence[Probe], reader: Reader) -> Iterator[Tensor]:
        """For each probe the log probabilities [J, V], float32, of its judged tokens, those of its
        spans in order. Raises ValueError for a probe that is longer than there is room for."""
        for begin in range(0, len(probes), WIDTH):
            yield from self._ask(probes[begin : begin + WIDTH], reader)

    def _ask(self, probes: Sequence[Probe], reader: Reader) -> list[Tensor]:
        spans = [self._begin(at, probe, reader) for at, probe in enumerate(probes)]
        rows: list[list[Tensor]] = [[] for _ in probes]  # that predict a judged token
        for at, probe in enumerate(probes):
            if _judged(probe, 0):
                rows[at].append(self._last_V)
        for step in range(max(len(probe.ids) for probe in probes) - 1):
            live = [at for at, probe in enumerate(probes) if step < len(probe.ids) - 1]
            batch = Batch(
                torch.tensor([probes[at].ids[step] for at in live]),
                [_moved(spans[at], row, step) for row, at in enumerate(live)],
                torch.arange(len(live)),
            )
            logits_RV = self._subject.forward(batch, self._state)
            for row, at in enumerate(live):
                if _judged(probes[at], step + 1):
                    rows[at].append(logits_RV[row].clone())
        return [torch.stack(found).float().log_softmax(dim=1) for found in rows]

    def _begin(self, at: int, probe: Probe, reader: Reader) -> Span:
        """Its first row, with a copy of the state, and of the page that the text does not fill."""
        shared, partial = divmod(self.length, PAGE_TOKENS)
        if partial + len(probe.ids) > OWN_PAGES * PAGE_TOKENS:
            raise ValueError(f"a question of {len(probe.ids)} tokens")
        own = self._text_pages + at * OWN_PAGES
        paged, slot = self._state.paged(), 1 + at
        if partial:
            paged[:, own] = paged[:, shared]
        for state in (self._state.kda, self._state.conv):
            state[:, slot] = state[:, 0]
        pages = reader.table(list(range(own, own + OWN_PAGES)))
        return Span(slot, at, 1, self.length, pages, True, context=reader.context)


def _judged(probe: Probe, at: int) -> bool:
    return any(begin <= at < end for begin, end in probe.spans)


def _moved(span: Span, row: int, by: int) -> Span:
    return Span(span.slot, row, 1, span.position + by, span.pages, True, context=span.context)
