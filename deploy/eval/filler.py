"""Text that means nothing here: what the facts of a long-context test are hidden in."""

import random
import re
from collections.abc import Iterator
from typing import Protocol

from expertmesh.deploy.training import chat_data as data
from expertmesh.deploy.training import wordlists as words


class Filler(Protocol):
    def sentences(self, rng: random.Random) -> Iterator[str]:
        """Without end; each begins with what separates it from the one before."""
        ...


class Noise:
    """The same few sentences over and over (RULER's noise)."""

    TEXT = (
        " The grass is green.", " The sky is blue.", " The sun is yellow.", " Here we go.",
        " There and back again.",
    )  # fmt: skip

    def sentences(self, rng: random.Random) -> Iterator[str]:
        while True:
            yield from self.TEXT


class Prose:
    """Sentences of drawing-room prose from templates, in paragraphs; nobody's text. It names no
    one whom a fact could be about."""

    PARTS = data.OPENINGS + data.MIDDLES + data.ENDINGS

    def sentences(self, rng: random.Random) -> Iterator[str]:
        while True:
            for at in range(rng.randint(3, 7)):
                told = rng.choice(self.PARTS).format(
                    t=rng.choice(data.TOPICS), n=f"Miss {rng.choice(SURNAMES)}",
                    m=f"Mr. {rng.choice(SURNAMES)}", s=rng.choice(data.SEASONS),
                    p=rng.choice(data.PLACES),
                )  # fmt: skip
                yield told if at == 0 else f" {told}"
            yield "\n\n"


SURNAMES = words.listed(
    "Allenby Barton Carver Denham Ellis Fairfax Goddard Hurst Ingram Jennings Lambert Merton "
    "Norris Otway Palmer Quincey Rushworth Stanhope Thornton Weston"
)


class Text:
    """A given text, from a place that the seed draws, round and round."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for a text without sentences."""
        self._sentences = re.findall(r".+?[.!?;:](?=\s|$)\s*|\S.*?\n\s*", text)
        if not self._sentences:
            raise ValueError("there is no sentence in the text")

    def sentences(self, rng: random.Random) -> Iterator[str]:
        at = rng.randrange(len(self._sentences))
        while True:
            yield self._sentences[at]
            at = (at + 1) % len(self._sentences)
