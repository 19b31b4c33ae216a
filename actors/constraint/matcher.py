"""One answer on its way through its grammar: which tokens may come next."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from expertmesh.actors.constraint.grammars import grammar_of
from expertmesh.actors.constraint.spec import Constraint, ConstraintError

Words = NDArray[np.int32]

# What compiling and one mask may cost at most. A mask that uses up its step fuel has taken about
# 10 ms, usual ones take microseconds; 250,000 lexer states take 130 MB.
LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=250_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)


def words_for(vocab_size: int) -> int:
    """int32 words of a mask with a bit per token."""
    return -(-vocab_size // 32)


def compile_matcher(tokenizer: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Raises ConstraintError with the compiler's reason, also where no text matches."""
    grammar = grammar_of(constraint)
    with no_panic():
        inner = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    with errors_of(inner):
        inner.compute_bitmask()  # shows dead ends, and grammars that are too large to use
    if inner.is_stopped() and not inner.is_accepting():
        raise ConstraintError("no text matches")
    return inner


def reason(inner: LLMatcher) -> str:
    """The matcher's error in one line, without what it adds for its own developers."""
    text = " ".join(inner.get_error().replace("<non-verbose/>", "").split())
    if text.startswith("NoExtension"):
        return "no text matches"
    if text.startswith("oneOf constraints"):
        return "oneOf: branches that do not exclude each other; anyOf may say the same"
    return text[:400]


class Matcher:
    """Follows the tokens of one sequence. One thread at a time. ends: the ids that end a text."""

    __slots__ = ("_inner", "constraint", "ends")

    def __init__(self, constraint: Constraint, inner: LLMatcher, ends: frozenset[int]) -> None:
        """inner: compiled from `constraint`; becomes this matcher's own."""
        self.constraint, self.ends, self._inner = constraint, ends, inner

    def fill(self, words: Words, unwanted: Collection[int] = ()) -> None:
        """Writes the mask of the next token: bit i % 32 of words[i // 32] is set where i may come.

        End ids may come where the text is complete, and only there. unwanted: ids that may not come
        either, as long as another one may.

        Raises ConstraintError when the grammar has failed, or nothing may come.
        """
        with errors_of(self._inner):
            self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            complete = self._inner.is_accepting()
        if not complete:
            _clear(words, self.ends)
        if unwanted:
            kept = words.copy()
            _clear(kept, unwanted)
            if kept.any():
                words[:] = kept
        if not words.any():
            raise ConstraintError("no token of the vocabulary continues the text")

    def accept(self, tokens: Sequence[int]) -> None:
        """The text goes on with these. Raises ConstraintError when it may not."""
        with errors_of(self._inner):
            self._inner.consume_tokens(list(tokens))


@contextmanager
def no_panic() -> Iterator[None]:
    """A bug of the library is a Rust panic, which is no Exception in Python."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ConstraintError(f"the grammar library failed: {error}"[:400]) from None
        raise


@contextmanager
def errors_of(inner: LLMatcher) -> Iterator[None]:
    """Raises ConstraintError for what went wrong: the library reports by the matcher's state."""
    with no_panic():
        yield
    if inner.is_error():
        raise ConstraintError(reason(inner))


def _clear(words: Words, ids: Collection[int]) -> None:
    bits = words.view(np.uint32)  # bit 31 does not fit a signed word
    for token in ids:
        bits[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
