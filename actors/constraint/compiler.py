"""The engine's side of constraints: compiled and replayed away from its step thread."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer

from expertmesh.actors.constraint.matcher import Matcher, compile_matcher
from expertmesh.actors.constraint.spec import Constraint
from expertmesh.actors.constraint.vocabulary import Vocabulary, build, vocabulary_of
from expertmesh.actors.model.tokenizer import Tokenizer

# What has been compiled in a trial (see trial.py) compiles here as well: there is more stack.
STACK_BYTES, TRIAL_STACK_BYTES = 64 << 20, 16 << 20
CACHED = 128
CACHED_TEXT = 4 << 20  # characters; a compiled grammar is many times its text
THREADS = 4  # a grammar that takes seconds holds up no other
# Copies of a compiled grammar share its lexer's states, whose number is limited: so many answers
# may add to them before it is compiled afresh.
COPIES = 64

Result = TypeVar("Result")
_stack_size = threading.Lock()  # it is a setting of the process


class Grammars:
    """Compiled grammars of one model by their text. From any thread."""

    def __init__(self, vocabulary: Vocabulary, executor: Executor | None = None) -> None:
        """executor: where compiling runs; by default threads of its own."""
        self.end_ids = frozenset(vocabulary.end_ids)
        self._vocabulary = vocabulary
        self._executor = executor or ThreadPoolExecutor(THREADS, "grammars")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Constraint, list[LLMatcher]] = OrderedDict()
        self._built: LLTokenizer | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, end_ids: Sequence[int]) -> "Grammars | None":
        """None without a tokenizer: then nobody knows what text a token is."""
        return None if tokenizer is None else cls(vocabulary_of(tokenizer, end_ids))

    def matcher(self, constraint: Constraint, tokens: Sequence[int]) -> "Future[Matcher]":
        """A matcher that has accepted `tokens`. The future raises ConstraintError."""
        return self._executor.submit(self._prepare, constraint, list(tokens))

    def _prepare(self, constraint: Constraint, tokens: Sequence[int]) -> Matcher:
        matcher = Matcher(constraint, self._copy(constraint), self.end_ids)
        if tokens:
            matcher.accept(tokens)
        return matcher

    def _copy(self, constraint: Constraint) -> LLMatcher:
        with self._lock:
            if self._built is None:
                self._built = build(self._vocabulary)
            copies = self._compiled.get(constraint)
            if copies:
                self._compiled.move_to_end(constraint)
                return copies.pop()
        tokenizer = self._built
        compiled = on_large_stack(lambda: compile_matcher(tokenizer, constraint), STACK_BYTES)
        with self._lock:
            self._compiled[constraint] = [compiled.deep_copy() for _ in range(COPIES)]
            self._compiled.move_to_end(constraint)
            while len(self._compiled) > CACHED or self._length() > CACHED_TEXT:
                self._compiled.popitem(last=False)
        return compiled

    def _length(self) -> int:
        return sum(len(constraint.text) for constraint in self._compiled)

    def forget(self, constraint: Constraint) -> None:
        """An answer of this grammar has failed: what its copies share may be used up."""
        with self._lock:
            self._compiled.pop(constraint, None)


def on_large_stack(work: Callable[[], Result], stack_bytes: int) -> Result:
    """`work` in a thread with a stack of that size; raises what it raises. A compiler that recurses
    into a nested grammar ends the process where the stack ends."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _stack_size:
        before = threading.stack_size(stack_bytes)
        try:
            thread = threading.Thread(target=run, name="grammar-compiler", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    return outcome.result()
