"""What takes more than one place of the text: the most frequent word, something to be kept in mind
through a chat, and a passage that returns."""

import random

from expertmesh.actors.model.chat import render_chat
from expertmesh.deploy.eval import needles
from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.training import wordlists as words

ZETA = 2.0
VOCABULARY = 12
PASSAGES, PASSAGE, GIVEN = 4, 16, 4  # how many; words of each, and of it in the question
TURNS_TOKENS = 100  # of a chat, besides its long text


def frequent(maker: Maker, rng: random.Random, length: int) -> Case:
    """Words drawn by a zeta law (RULER's FWE), then other text for a quarter of the length. Of all
    of them the most frequent must be the likeliest word."""
    encode = maker.tokenizer.encode
    firsts: dict[int, str] = {}
    for word in rng.sample(words.NOUNS, len(words.NOUNS)):
        firsts.setdefault(encode(f" {word}")[0], word)  # told apart by their first token
    chosen = list(firsts.items())[:VOCABULARY]
    weights = [1 / rank**ZETA for rank in range(1, len(chosen) + 1)]
    writer = maker.writer()
    while len(writer.ids) < length * 3 // 4:
        writer.text(f" {rng.choices(chosen, weights)[0][1]}")
    rest, _ = maker.haystack(rng, length - len(writer.ids), [])
    writer.text("\n\n").tokens(rest)
    asked = maker.writer().text("\n\nThe word is")
    asked.spans.append((len(asked.ids), len(asked.ids) + 1))
    asked.tokens([chosen[0][0]])
    return Case(tuple(writer.ids), (asked.probe(0.0, [first for first, _ in chosen]),))


def kept(maker: Maker, rng: random.Random, length: int) -> Case:
    """In a chat: the first turn asks to remember something, a long text follows as the second, and
    in the third it is needed. Raises ChatError where the tokenizer names no chat format."""
    (fact,) = needles.facts(rng, 1)
    ids, _ = maker.haystack(rng, max(64, length - TURNS_TOKENS), [])
    turns = [
        {"role": "user", "content": fact.statement},
        {"role": "assistant", "content": "I will remember that."},
        {"role": "user", "content": maker.tokenizer.decode(ids)},
        {"role": "assistant", "content": "I will remember that."},
    ]
    asked = [*turns, {"role": "user", "content": fact.question}]
    context = render_chat(turns, None, None, None, maker.tokenizer, add_generation_prompt=False)
    whole = render_chat(asked, None, None, None, maker.tokenizer)
    writer = maker.writer().tokens(whole[len(context) :]).text(fact.head).answer(f" {fact.value}")
    return Case(tuple(context), (writer.probe(0.0),))


def returning(maker: Maker, rng: random.Random, length: int) -> Case:
    """Passages of random words somewhere in the text, then the first words of one again: the rest
    is judged by its tokens more than by all of them together."""
    pool = words.NOUNS + words.ADJECTIVES
    passages = [[rng.choice(pool) for _ in range(PASSAGE)] for _ in range(PASSAGES)]
    ids, depths = maker.haystack(
        rng, length, [(rng.random(), f"Copy this: {' '.join(passage)}") for passage in passages]
    )
    probes = []
    for passage, depth in zip(passages, depths, strict=True):
        writer = maker.writer().text("\n\nCopy: ", " ".join(passage[:GIVEN]))
        probes.append(writer.answer(f" {' '.join(passage[GIVEN:])}").probe(depth))
    return Case(tuple(ids), tuple(probes))
