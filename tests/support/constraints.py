"""Compiled constraints for tests, on small vocabularies, in the calling thread."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from expertmesh.actors.constraint.compiler import Grammars
from expertmesh.actors.constraint.matcher import Matcher, words_for
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import Vocabulary


class Inline(Executor):
    """Runs work where it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def small_vocabulary(*words: str) -> Vocabulary:
    """The words' bytes as ids 0, 1, ..., then the id `<|end|>` and one more special, `<|mark|>`."""
    tokens = [word.encode() for word in words]
    return Vocabulary([*tokens, b"<|end|>", b"<|mark|>"], len(tokens), [len(tokens)])


def grammars_of(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary, Inline())


def matcher_of(vocabulary: Vocabulary, constraint: Constraint) -> Matcher:
    """Raises ConstraintError."""
    return grammars_of(vocabulary).matcher(constraint, []).result()


def allowed(matcher: Matcher, vocabulary: Vocabulary, unwanted: frozenset[int] = frozenset()) -> (
    set[int]
):  # fmt: skip
    """The ids that may come next."""
    words = np.zeros(words_for(len(vocabulary.tokens)), dtype=np.int32)
    matcher.fill(words, unwanted)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(vocabulary.tokens)]
    return set(np.flatnonzero(bits).tolist())


def walk(
    grammars: Grammars,
    vocabulary: Vocabulary,
    constraint: Constraint,
    rng: np.random.Generator,
    most: int = 2000,
) -> list[int] | None:
    """Tokens of some answer, its end left out; None when it has not ended after `most`. Special
    tokens are half of what is drawn where they may come, so that texts stay short."""
    matcher, tokens = grammars.matcher(constraint, []).result(), list[int]()
    while len(tokens) < most:
        ids = sorted(allowed(matcher, vocabulary))
        special = [token for token in ids if token >= vocabulary.ordinary]
        token = int(rng.choice(special if special and rng.random() < 0.5 else ids))
        if token in vocabulary.end_ids:
            return tokens
        tokens.append(token)
        matcher.accept([token])
    return None
