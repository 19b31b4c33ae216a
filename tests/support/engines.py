"""Drive an engine by hand: build one, submit, step to the end, compare with a run alone."""

from dataclasses import dataclass, field
from typing import Any

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import (
    GenerateRequest,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.state.offload.spill import Spill
from expertmesh.actors.state.pages import pages_for
from tests.support.fake_model import FakeModel

EOS = 3


def fake_engine(
    pages: int = 64, slots: int = 8, model: FakeModel | None = None, **settings: Any
) -> Engine:
    model = model or FakeModel()
    state = model.new_state(pages, slots)
    return Engine(model, state, None, EngineSettings(**settings), [EOS])  # type: ignore[arg-type]


def request(name: str, prompt: list[int], max_tokens: int = 8, **params: Any) -> GenerateRequest:
    """Greedy and without an end id unless asked otherwise."""
    priority = params.pop("priority", 0)
    params.setdefault("temperature", 0.0)
    params.setdefault("ignore_eos", True)
    return GenerateRequest(name, prompt, SamplingParams(max_tokens=max_tokens, **params), priority)


@dataclass
class Answer:
    """All outputs of one request, joined."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    routed: bytes = b""
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    lost: bool = False
    finishes: int = 0

    def add(self, output: TokenOutput) -> None:
        assert self.finish_reason is None, "an output after the last"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            assert self.prompt_logprobs is None
            self.prompt_logprobs = output.prompt_logprobs
        self.routed += output.routed_experts or b""
        if output.finish_reason is not None:
            self.finishes += 1
            self.finish_reason = output.finish_reason
            self.stop_reason, self.error = output.stop_reason, output.error
            self.lost = output.lost


def finish(
    engine: Engine, answers: dict[str, Answer] | None = None, max_steps: int = 20_000
) -> dict[str, Answer]:
    """Steps until the engine is idle."""
    answers = {} if answers is None else answers
    for _ in range(max_steps):
        if not engine.has_work:
            return answers
        collect(engine.step(), answers)
    raise AssertionError(f"not idle after {max_steps} steps: {engine.stats()}")


def collect(outputs: list[TokenOutput], answers: dict[str, Answer]) -> None:
    for output in outputs:
        answers.setdefault(output.request_id, Answer()).add(output)


def check_books(engine: Engine) -> None:
    """No page or slot owned twice, none lost, and each sequence holds exactly what it lists."""
    running, waiting = engine.scheduler.running, engine.scheduler.waiting
    for pool, of in ((engine.pages, "pages"), (engine.slots, "slot")):
        held: set[int] = set()
        for seq in running:
            mine = seq.near if of == "pages" else [seq.slot]
            assert sorted(mine) == pool.owned_by(seq.number)
            # Only pages that are known by a name are read by several.
            assert not held.intersection(n for n in mine if pool.alone(seq.number, n))
            held.update(mine)
        assert len(held) + pool.free == pool.size
    engine.pages.check()
    room, far = engine.scheduler.room, [seq for seq in running if seq.context is not None]
    assert sum(room.held(seq.number) for seq in far) == room.capacity - room.free <= room.capacity
    for seq in far:
        assert seq.context is not None
        assert seq.context.host_bytes <= room.held(seq.number)
    for seq in running:
        assert len(seq.pages) >= pages_for(seq.computed)
        assert seq.computed <= len(seq.tokens)
    for seq in waiting:
        assert not seq.pages and seq.slot == -1 and seq.computed == 0
    for queue in (running, waiting):
        assert [seq.rank for seq in queue] == sorted(seq.rank for seq in queue)


def check_idle(engine: Engine) -> None:
    check_books(engine)
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.pages_free, stats.slots_free) == (stats.pages_total, stats.slots_total)
    assert not engine.has_work


def spill_of(engine: Engine) -> Spill | None:
    """Where its old pages go when host memory is filled."""
    offload = engine._contexts._offload
    return None if offload is None else offload.spill
