"""What logits must be, to the last bit: one sequence alone, its state written once and in order.

No engine, no cache, no scheduler: the model itself, driven token by token over state of its own.
Results are remembered, since schedules ask for the same texts again and again.
"""

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from expertmesh.actors.attention.masks import Masks
from expertmesh.actors.attention.sampler import Sampled, Sampler
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.model.batch import Batch, Span, prompt_tail
from expertmesh.actors.state.pages import pages_for
from expertmesh.kernels.mla.types import NO_TAIL
from tests.support.runner import Runner

Path = Literal["prompt", "answer"]


class Piece(NamedTuple):
    """Tokens that took one path: a prompt's chunks, or an answer's single rows."""

    path: Path
    tokens: tuple[int, ...]


class Row(NamedTuple):
    """Logits behind a token: a digest of their bits, and the likeliest id (lowest of equals)."""

    digest: int
    best: int


def row_of(logits_V: Tensor) -> Row:
    values = np.ascontiguousarray(logits_V.numpy())
    return Row(xxh3_64_intdigest(values), int(values.argmax()))


@dataclass
class Oracle:
    """rows: after each answer token of a text that begins with some pieces, row 0 after those."""

    runner: Runner
    rows: dict[tuple[Piece, ...], list[Row]] = field(default_factory=dict)
    computed: int = 0  # texts that were not remembered

    def expect(self, before: tuple[Piece, ...], answer: Tokens[int]) -> list[Row]:
        """Rows after `before` and after each token of `answer` but the last: what an engine sees
        when it draws each of them."""
        key = (*before, Piece("answer", tuple(answer[:-1])))
        known = self.rows.get(key)
        if known is None:
            known = self._run(before, answer[:-1])
            for length in range(len(answer)):
                self.rows[(*before, Piece("answer", tuple(answer[:length])))] = known[: length + 1]
            self.computed += 1
        return known[: len(answer)]

    def greedy(self, prompt: Tokens[int], count: int) -> list[int]:
        """The answer of `count` likeliest tokens."""
        before, answer = (Piece("prompt", tuple(prompt)),), list[int]()
        text = _Text(self.runner, len(prompt) + count)
        row = text.add(prompt, decode=False)
        while True:
            self.rows[(*before, Piece("answer", tuple(answer)))] = [
                *(self.rows[(*before, Piece("answer", tuple(answer[:-1])))] if answer else []), row
            ]  # fmt: skip
            answer.append(row.best)
            if len(answer) == count:
                return answer
            row = text.add(answer[-1:], decode=True)

    def _run(self, before: tuple[Piece, ...], answer: Tokens[int]) -> list[Row]:
        text = _Text(self.runner, sum(len(piece.tokens) for piece in before) + len(answer))
        for path, tokens in before:
            if path == "prompt":
                last = text.add(tokens, decode=False)
            else:
                for token in tokens:
                    last = text.add([token], decode=True)
        return [last, *(text.add([token], decode=True) for token in answer)]


class _Text:
    """One sequence, alone in state of its own."""

    def __init__(self, runner: Runner, most: int) -> None:
        self._runner, self._at = runner, 0
        self._state = runner.model.new_state(pages_for(most), 1)
        self._pages = list(range(self._state.pages))

    def add(self, tokens: Tokens[int], *, decode: bool) -> Row:
        """The row behind the last of them."""
        tail = NO_TAIL if decode else prompt_tail(self._at + len(tokens))
        span = Span(0, 0, len(tokens), self._at, self._pages, decode, tail=tail)
        batch = Batch(torch.tensor(tokens), [span], torch.tensor([len(tokens) - 1]))
        self._at += len(tokens)
        return row_of(self._runner.model.forward(batch, self._state, self._runner.exchange)[0])


class Tap(Sampler):
    """A sampler that keeps what it was given: per request, rows by the number of tokens before."""

    def __init__(self, of: Sampler) -> None:
        self.__dict__.update(of.__dict__)
        self._pick = self._pick_here
        self.seen: dict[str, dict[int, Row]] = {}

    def sample(
        self, logits_BV: Tensor, sequences: list[Sequence], masks: Masks | None = None
    ) -> Sampled:
        for logits_V, seq in zip(logits_BV, sequences, strict=True):
            self.seen.setdefault(seq.id, {})[len(seq.tokens)] = row_of(logits_V)
        return super().sample(logits_BV, sequences, masks)


def tap(engine: Any) -> Tap:
    """Puts one into an engine."""
    engine.sampler = Tap(engine.sampler)
    return engine.sampler
