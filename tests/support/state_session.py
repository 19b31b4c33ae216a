"""One engine over cached state, asked by hand; every answer is held against the model alone."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.actors.state.cache import StateCache
from tests.support.engines import Answer, check_books, check_idle, collect, request
from tests.support.state_model import VOCAB, cached, small_model
from tests.support.state_oracle import Oracle, Piece, Tap, tap
from tests.support.state_store import MemoryStore


@cache
def oracle() -> Oracle:
    """Of the small model; remembers for all tests of this process."""
    return Oracle(small_model())


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def check(seen: Tap, each: GenerateRequest, answer: Answer) -> None:
    """The answer is the model's own, logits included."""
    assert answer.finish_reason == "length", answer
    expected = oracle().expect((Piece("prompt", tuple(each.prompt_ids)),), answer.token_ids)
    rows = seen.seen[each.request_id]
    known = len(each.prompt_ids)
    for at, row in enumerate(expected):
        assert rows[known + at] == row, f"{each.request_id}: token {at} of {known} prompt tokens"
        assert answer.token_ids[at] == row.best


class Session:
    """An engine, its tap, what it was asked and how many prompt tokens it did not compute."""

    def __init__(self, engine: Engine, store: MemoryStore | None = None) -> None:
        self.engine, self.store, self.tap = engine, store, tap(engine)
        self.requests: dict[str, GenerateRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.cached: dict[str, int] = {}

    def submit(self, name: str, prompt: list[int], new: int = 4, **params: Any) -> None:
        self.requests[name] = request(name, prompt, new, **params)
        self.engine.submit(self.requests[name])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            outputs = self.engine.step()
            for output in outputs:
                known = self.cached.get(output.request_id, 0)
                self.cached[output.request_id] = max(known, output.cached_tokens)
            collect(outputs, self.answers)
            check_books(self.engine)
            assert self.engine.failed is None, self.engine.failed
            if self.store is not None:
                self.store.tick()

    @property
    def open(self) -> list[str]:
        ended = {name for name, each in self.answers.items() if each.finish_reason}
        return [name for name in self.requests if name not in ended]

    def finish(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.open:
                check_idle(self.engine)
                if isinstance(self.engine.cache, StateCache):
                    self.engine.cache.device.check()
                return
            self.step()
        raise AssertionError(f"not idle after {most} steps: {self.engine.stats()}")

    def ask(self, name: str, prompt: list[int], new: int = 4, **params: Any) -> int:
        """One request to its end, checked; how much of its prompt was cached."""
        self.submit(name, prompt, new, **params)
        self.finish()
        check(self.tap, self.requests[name], self.answers[name])
        return self.cached[name]

    def check_all(self, names: Sequence[str] = ()) -> None:
        for name in names or self.requests:
            check(self.tap, self.requests[name], self.answers[name])


def session(store: MemoryStore | None = None, graphs: bool = False, **sizes: Any) -> Session:
    return Session(cached(small_model(graphs=graphs), store=store, **sizes), store)
