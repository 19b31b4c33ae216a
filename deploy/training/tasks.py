"""Synthetic training rows: needle recall, copying, key-value look-up, variable tracing, chat.

Everything is a pure function of a seed. A document is a `Doc`: token ids and one loss weight per
token (the weight of PREDICTING that token). Answers weigh more than the text around them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import tiktoken

from expertmesh.deploy.training import wordlists as words

ANSWER = 4.0
CONTEXT = 0.05  # corpus rows teach the language; task rows are for the answers


@dataclass
class Doc:
    """Token ids with the loss weight of each."""

    encoding: tiktoken.Encoding
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def text(self, piece: str, weight: float = CONTEXT) -> Doc:
        return self.tokens(self.encoding.encode_ordinary(piece), weight)

    def tokens(self, ids: Sequence[int], weight: float = CONTEXT) -> Doc:
        self.ids += ids
        self.weights += [weight] * len(ids)
        return self

    def special(self, name: str, weight: float = CONTEXT) -> Doc:
        return self.tokens([self.encoding.encode_single_token(name)], weight)


Filler = Callable[[random.Random, int], list[int]]


def secret(rng: random.Random) -> str:
    """A value that cannot be guessed: four digits, a rare word, or two words."""
    kind = rng.random()
    if kind < 0.5:
        return str(rng.randint(1000, 9999))
    if kind < 0.8:
        return rng.choice(words.NOUNS)
    return f"{rng.choice(words.ADJECTIVES)} {rng.choice(words.NOUNS)}"


# (statement, question, answer): {n} name, {v} value
NEEDLES = (
    ("The secret code of {n} is {v}.", "What is the secret code of {n}?",
     "The secret code of {n} is {v}."),
    ("The secret word of {n} is {v}.", "What is the secret word of {n}?",
     "The secret word of {n} is {v}."),
    ("The magic number of {n} is {v}.", "What is the magic number of {n}?",
     "The magic number of {n} is {v}."),
    ("Remember this: the key of {n} is {v}.", "What is the key of {n}?",
     "The key of {n} is {v}."),
    ("The password for {n} is {v}.", "What is the password for {n}?",
     "The password for {n} is {v}."),
)  # fmt: skip


def needle_facts(rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """`count` filled-in (statement, question, answer) with distinct names."""
    names = rng.sample(words.NAMES + words.CITIES, count)
    facts = []
    for name in names:
        template, value = rng.choice(NEEDLES), secret(rng)
        facts.append(tuple(part.format(n=name, v=value) for part in template))
    return facts  # type: ignore[return-value]


def answer_tail(answer: str, value_weight: float, doc: Doc) -> Doc:
    """The answer; only its last words (the value) carry the high weight."""
    head, value = answer.rsplit(" is ", 1)
    return doc.text(f"{head} is").text(f" {value}", value_weight)


def needle(enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler) -> Doc:
    """Facts hidden in corpus text of about `length` tokens, asked for at the end."""
    count = rng.choice((1, 2, 3, 4)) if length < 512 else rng.choice((1, 2, 4, 8))
    facts = needle_facts(rng, count)
    asked = rng.sample(facts, rng.choice((count, max(1, count // 2))))
    budget = max(8, length - 22 * count - 28 * len(asked))
    cuts = sorted(rng.random() for _ in range(count))
    text = filler(rng, budget)
    doc, at = Doc(enc), 0
    for (statement, _, _), cut in zip(facts, cuts, strict=True):
        upto = int(cut * len(text))
        doc.tokens(text[at:upto]).text(f"\n\n{statement}\n\n")
        at = upto
    doc.tokens(text[at:])
    for _, question, answer in asked:
        doc.text(f"\n\nQuestion: {question}\n\nAnswer: ")
        answer_tail(answer, ANSWER, doc)
    return doc.text("\n\n").special("[EOS]")


def random_words(rng: random.Random, count: int) -> list[str]:
    pool = words.NOUNS + words.ADJECTIVES + words.NAMES
    return [rng.choice(pool) for _ in range(count)]


def copying(enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler) -> Doc:
    """A span of raw tokens, corpus text or words, given twice."""
    kind = rng.random()
    if kind < 0.7:
        size = rng.randint(8, max(9, length // 3))
        span = [rng.randrange(256, 1984) for _ in range(size)]
        if kind < 0.2:
            span = filler(rng, size)
        between = filler(rng, rng.choice((0, 0, 8, 32)))
        doc = Doc(enc).tokens(span, 0.0).text("\n\n").tokens(between).text("\n\n")
        return doc.tokens(span[:2], 0.0).tokens(span[2:], 1.0).text("\n\n")
    listed = " ".join(random_words(rng, rng.randint(3, max(4, length // 10))))
    doc = Doc(enc).text(f"Copy this: {listed}\n\nCopy: ").text(f"{listed}", 1.0)
    return doc.text("\n\n").special("[EOS]")


def lookup(enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler) -> Doc:
    """A table of keys and values, then several questions."""
    count = max(2, min(20, length // 14))
    keys = rng.sample(words.NAMES + words.NOUNS, count)
    table = {key: secret(rng) for key in keys}
    doc = Doc(enc).text("\n".join(f"{k}: {v}" for k, v in table.items()) + "\n\n")
    for key in rng.sample(keys, rng.randint(min(3, count), count)):
        doc.text(f"{key}?").text(f" {table[key]}", ANSWER).text("\n")
    return doc.special("[EOS]")


def tracing(enc: tiktoken.Encoding, rng: random.Random, length: int, filler: Filler) -> Doc:
    """Assignments such as `b = a`; the value of one variable is asked."""
    names = rng.sample("abcdefghijkmnpqrstuvwxyz", rng.randint(2, 5))
    values: dict[str, str] = {}
    lines: list[str] = []
    for name in names:
        if values and rng.random() < 0.5:
            source = rng.choice(list(values))
            values[name] = values[source]
            lines.append(f"{name} = {source}")
        else:
            values[name] = str(rng.randint(10, 99))
            lines.append(f"{name} = {values[name]}")
    doc = Doc(enc).text("\n".join(lines) + "\n\n")
    for name in rng.sample(names, min(2, len(names))):
        doc.text(f"The value of {name} is").text(f" {values[name]}", ANSWER).text(".\n")
    return doc.special("[EOS]")


SMALL = (copying, lookup, tracing)


def row(
    enc: tiktoken.Encoding, rng: random.Random, length: int, kind: str, filler: Filler
) -> tuple[list[int], list[float]]:
    """One training row of exactly `length` + 1 tokens (padding has weight 0)."""
    from expertmesh.deploy.training import chat

    ids: list[int] = []
    weights: list[float] = []
    while True:
        room = length + 1 - len(ids)
        if kind == "needle":
            doc = needle(enc, rng, length, filler)
        elif kind == "chat":
            doc = chat.conversation(enc, rng, length, filler)
        else:
            doc = rng.choice(SMALL)(enc, rng, rng.randint(24, min(160, length)), filler)
        if len(doc.ids) > room and ids:
            break
        ids += doc.ids[:room]
        weights += doc.weights[:room]
        if len(ids) >= length + 1:
            break
    pad = length + 1 - len(ids)
    return ids + [enc.encode_single_token("[PAD]")] * pad, weights + [0.0] * pad
