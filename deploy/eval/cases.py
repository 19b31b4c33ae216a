"""What a long-context test is made of: a text, and things asked after it whose answer is known."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from expertmesh.actors.model.tokenizer import Tokenizer
from expertmesh.deploy.eval.filler import Filler


@dataclass(frozen=True, slots=True)
class Probe:
    """One continuation of a case's text, given token by token. spans: the parts of `ids` that are
    the answer, as (begin, end); all of them must be what greedy decoding gives. depth: where in the
    text the answer stands, 0 its beginning, 1 its end. choices: ids among which the first token of
    a span is chosen, () for the whole vocabulary."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    depth: float
    choices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Everything asked of one text. The probes do not see each other."""

    context: tuple[int, ...]
    probes: tuple[Probe, ...]


class Writer:
    """Token ids, piece by piece: each piece is encoded on its own, as in the model's training."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.spans: list[tuple[int, int]] = []

    def text(self, *pieces: str) -> "Writer":
        for piece in pieces:
            self.ids += self.tokenizer.encode(piece)
        return self

    def tokens(self, ids: Sequence[int]) -> "Writer":
        self.ids += ids
        return self

    def answer(self, piece: str) -> "Writer":
        """Text that is to be judged."""
        begin = len(self.ids)
        self.text(piece)
        self.spans.append((begin, len(self.ids)))
        return self

    def probe(self, depth: float, choices: Sequence[int] = ()) -> Probe:
        return Probe(tuple(self.ids), tuple(self.spans), depth, tuple(choices))


@dataclass(frozen=True, slots=True)
class Maker:
    """What generators need besides a seed and a length."""

    tokenizer: Tokenizer
    filler: Filler

    def writer(self) -> Writer:
        return Writer(self.tokenizer)

    def haystack(
        self, rng: random.Random, tokens: int, pieces: Sequence[tuple[float, str]]
    ) -> tuple[list[int], list[float]]:
        """About `tokens` ids of filler with each piece at its depth; the ids, and for each piece
        where it begins, as a share of them. Pieces stand between sentences of the filler."""
        order = sorted(range(len(pieces)), key=lambda at: pieces[at][0])
        encoded = [self.tokenizer.encode(f"\n\n{text}\n\n") for _, text in pieces]
        room = max(0, tokens - sum(map(len, encoded)))
        source = self.filler.sentences(rng)
        ids: list[int] = []
        begins = [0] * len(pieces)
        filled = 0
        for at in [*order, None]:
            wanted = room if at is None else int(pieces[at][0] * room)
            while filled < wanted:
                sentence = self.tokenizer.encode(next(source))[: room - filled]
                ids += sentence
                filled += len(sentence)
            if at is not None:
                begins[at] = len(ids)
                ids += encoded[at]
        return ids, [begin / max(1, len(ids)) for begin in begins]
