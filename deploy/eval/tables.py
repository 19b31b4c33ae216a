"""Many small facts at once: key-value tables (MQAR), and chains of assignments (RULER's variable
tracking)."""

import random

from expertmesh.deploy.eval.cases import Case, Maker
from expertmesh.deploy.training import wordlists as words

ASKED = 8
CHAINS = 4


def mqar(maker: Maker, rng: random.Random, length: int) -> Case:
    """A table of keys and values that fills the text, then one key. Which ones are asked follows a
    power law of the distance: near ones more often, far ones too."""
    names = words.NAMES + words.NOUNS
    keys = [f"{first} {second}" for first in words.ADJECTIVES for second in names]
    rng.shuffle(keys)
    writer = maker.writer()
    rows: list[tuple[str, str, int]] = []
    for key in keys:
        if len(writer.ids) >= length:
            break
        value = str(rng.randint(10, 99))
        rows.append((key, value, len(writer.ids)))
        writer.text(f"{key}: {value}\n")
    writer.text("\n")
    probes = []
    for _ in range(min(ASKED, len(rows))):
        key, value, begin = rows[len(rows) - _gap(rng, len(rows))]
        asked = maker.writer().text(f"{key}?").answer(f" {value}")
        probes.append(asked.probe(begin / len(writer.ids)))
    return Case(tuple(writer.ids), tuple(probes))


def _gap(rng: random.Random, most: int) -> int:
    """1..most, with density proportional to 1 / gap."""
    return min(most, int((most + 1) ** rng.random()))


def tracing(maker: Maker, rng: random.Random, length: int) -> Case:
    """Chains of assignments (`a = 12`, `b = a`, ...) over one to four hops, in a haystack; the last
    name of each is asked. The lines of a chain are in order, all else is mixed."""
    letters = rng.sample("abcdefghijkmnpqrstuvwxyz", sum(range(2, CHAINS + 2)))
    pieces: list[tuple[float, str]] = []
    asked = []
    for hops in range(1, CHAINS + 1):
        named = [letters.pop() for _ in range(hops + 1)]
        value = str(rng.randint(10, 99))
        places = sorted(rng.random() for _ in named)
        for place, name, source in zip(places, named, [value, *named], strict=False):
            pieces.append((place, f"{name} = {source}"))
        writer = maker.writer().text(f"\n\nThe value of {named[-1]} is").answer(f" {value}")
        asked.append(writer.probe(places[0]))
    ids, _ = maker.haystack(rng, length, pieces)
    return Case(tuple(ids), tuple(asked))
