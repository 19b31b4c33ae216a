"""Facts in a haystack (RULER's needle tests): one, several, hundreds of one kind, several of one
name."""

import random
from dataclasses import dataclass, replace

from expertmesh.deploy.eval.cases import Case, Maker, Probe
from expertmesh.deploy.training import wordlists as words

# (statement, question, answer up to the value): {n} name
FORMS = (
    ("The secret code of {n} is", "What is the secret code of {n}?", "The secret code of {n} is"),
    ("The secret word of {n} is", "What is the secret word of {n}?", "The secret word of {n} is"),
    ("The magic number of {n} is", "What is the magic number of {n}?",
     "The magic number of {n} is"),
    ("Remember this: the key of {n} is", "What is the key of {n}?", "The key of {n} is"),
    ("The password for {n} is", "What is the password for {n}?", "The password for {n} is"),
)  # fmt: skip
ASKED = 8


@dataclass(frozen=True, slots=True)
class Fact:
    form: tuple[str, str, str]
    name: str
    value: str

    @property
    def statement(self) -> str:
        return f"{self.form[0].format(n=self.name)} {self.value}."

    @property
    def question(self) -> str:
        return self.form[1].format(n=self.name)

    @property
    def head(self) -> str:
        return self.form[2].format(n=self.name)


def facts(rng: random.Random, count: int) -> list[Fact]:
    """About distinct names, each of another form while there are some."""
    names = rng.sample(words.NAMES + words.CITIES, count)
    forms = rng.sample(FORMS, len(FORMS))
    return [Fact(forms[at % len(forms)], name, _value(rng)) for at, name in enumerate(names)]


def _value(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return str(rng.randint(10, 99))
    return rng.choice(words.NOUNS)


def _ask(maker: Maker, asked: list[Fact], depth: float) -> Probe:
    writer = maker.writer()
    for fact in asked:
        writer.text(f"\n\nQuestion: {fact.question}\n\nAnswer: ", fact.head)
        writer.answer(f" {fact.value}")
    return writer.probe(depth)


def single(maker: Maker, rng: random.Random, length: int) -> Case:
    """One fact, anywhere."""
    (fact,) = facts(rng, 1)
    ids, (depth,) = maker.haystack(rng, length, [(rng.random(), fact.statement)])
    return Case(tuple(ids), (_ask(maker, [fact], depth),))


def multikey(maker: Maker, rng: random.Random, length: int) -> Case:
    """Three facts, each asked alone: the others are there to be mistaken for it."""
    return _each_alone(maker, rng, length, facts(rng, 3))


def _each_alone(maker: Maker, rng: random.Random, length: int, told: list[Fact]) -> Case:
    count = len(told)
    places = [(at + rng.random()) / count for at in range(count)]  # every depth alike
    ids, depths = maker.haystack(
        rng, length, [(place, fact.statement) for place, fact in zip(places, told, strict=True)]
    )
    return Case(tuple(ids), tuple(_ask(maker, [f], d) for f, d in zip(told, depths, strict=True)))


def words_asked(maker: Maker, rng: random.Random, length: int) -> Case:
    """Eight facts whose values are words, each asked alone. What a recurrent state keeps of so many
    is less than of one, and of words less than of numbers."""
    told = [replace(fact, value=rng.choice(words.NOUNS)) for fact in facts(rng, ASKED)]
    return _each_alone(maker, rng, length, told)


def multiquery(maker: Maker, rng: random.Random, length: int) -> Case:
    """Three facts, asked one after another; all of them must be right."""
    told = facts(rng, 3)
    ids, depths = maker.haystack(rng, length, [(rng.random(), fact.statement) for fact in told])
    asked = rng.sample(told, 3)
    return Case(tuple(ids), (_ask(maker, asked, min(depths)),))


def distractors(maker: Maker, rng: random.Random, length: int) -> Case:
    """A haystack of nothing but such facts, of one form, about two-part names."""
    form = rng.choice(FORMS)
    told: list[Fact] = []
    writer = maker.writer()
    names = [f"{first} {last}" for first in words.NAMES for last in words.CITIES]
    rng.shuffle(names)
    begins = []
    for name in names:
        if len(writer.ids) >= length:
            break
        fact = Fact(form, name, _value(rng))
        told.append(fact)
        begins.append(len(writer.ids))
        writer.text(f"{fact.statement}\n\n")
    probes = [
        _ask(maker, [told[at]], begins[at] / len(writer.ids))
        for at in sorted(rng.sample(range(len(told)), min(ASKED, len(told))))
    ]
    return Case(tuple(writer.ids), tuple(probes))


def multivalue(maker: Maker, rng: random.Random, length: int) -> Case:
    """One name with two values; both are asked for, in the order in which they were told."""
    name = rng.choice(words.NAMES)
    told = [Fact(FORMS[0], name, value) for value in map(str, rng.sample(range(10, 100), 2))]
    places = sorted(rng.random() for _ in told)
    ids, depths = maker.haystack(
        rng, length, [(place, fact.statement) for place, fact in zip(places, told, strict=True)]
    )
    return Case(tuple(ids), (_ask(maker, told, depths[0]),))
