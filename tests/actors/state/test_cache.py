"""What running sequences leave behind: places for it, how often, and what lets go of it again."""

import math
from collections.abc import Callable
from pathlib import Path
from threading import Event

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.item import Name
from expertmesh.actors.state.pages import pages_for
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.state_below import wait_for
from tests.support.state_model import cached, poisoned, small_model
from tests.support.state_session import Session, ids, session
from tests.support.state_store import Faults, MemoryStore, Stored
from tests.support.tiers import FakeDisk, finished

RUNNER = small_model()


def test_two_that_save_in_one_step_and_one_place() -> None:
    one = session(state={"snapshots": 1})
    for seed in (1, 2):
        one.submit(f"r{seed}", ids(seed, 100), 3)
    one.step()
    assert len(one.engine.scheduler.running) == 2
    one.finish()
    one.check_all()
    assert one.engine.stats().cache.snapshots == 1
    assert sorted(one.ask(f"again{seed}", ids(seed, 100), 3) for seed in (1, 2)) == [0, 64]


def test_a_snapshot_that_was_used_outlives_a_newer_one() -> None:
    one = session(state={"snapshots": 2, "ladder_tokens": 4096})
    for seed in (3, 4):
        one.ask(f"r{seed}", ids(seed, 100), 1)
    for name in ("used", "used again"):
        assert one.ask(name, ids(3, 100), 1) == 64
    one.engine.cache.evict(pages=0, snapshots=1)
    assert one.ask("again", ids(3, 100), 1) == 64
    assert one.ask("forgotten", ids(4, 100), 1) == 0


class Running:
    """One sequence over a cache, computed token by token without a model."""

    def __init__(self, cache: StateCache, prompt: list[int], answer: list[int]) -> None:
        self.cache, self.answer = cache, answer
        self.seq = sequence(prompt)
        cache.open(self.seq, "")
        assert cache.attach(self.seq) == 0
        self.seq.pages = cache.pages_of(self.seq, pages_for(len(prompt + answer)))
        self.seq.slot = 0
        cache.begin([self.seq])
        cache.saves(self.seq, 0, len(prompt))
        self._compute_to(len(prompt))

    def run(self, tokens: int) -> None:
        """Until so many are computed, and one more is known."""
        while self.seq.computed < tokens:
            self.seq.tokens.append(self.answer[self.seq.generated])
            self._compute_to(self.seq.computed + 1)

    def _compute_to(self, tokens: int) -> None:
        self.seq.computed = tokens
        self.cache.commit(self.seq)


def sequence(prompt: list[int], resumed: list[int] | None = None) -> Sequence:
    params = SamplingParams(max_tokens=2000)
    return Sequence(
        GenerateRequest("r", prompt, params, resume_ids=resumed or []), 1, 0, frozenset()
    )


def on_disk(store: MemoryStore) -> dict[Name, Stored]:
    return {name: each for name, each in store.stored.items() if each.tier == "disk"}


def test_whoever_takes_over_an_answer_computes_little_of_it_again() -> None:
    settings = StateSettings(host_bytes=0, disk=Path("disk"), disk_bytes=64 << 20)
    assert settings.checkpoint_tokens == 256
    for prompt_len in (100, 257):
        prompt, answer = ids(5, prompt_len), ids(6, 800)
        store = MemoryStore()
        cache = StateCache(poisoned(RUNNER.model, 20, 1, 4), settings, b"small", store)
        one = Running(cache, prompt, answer)
        worst = 0
        for at in range(257, 800, 61):
            one.run(at)
            # Another process, which finds nothing but what lies on the disk.
            left = MemoryStore(faults=Faults(delay=0), stored=on_disk(store))
            other = StateCache(poisoned(RUNNER.model, 20, 1, 4), settings, b"small", left)
            heir = sequence(prompt, [*one.seq.tokens[prompt_len:], 1])
            other.open(heir, "")
            assert other.attach(heir) == 0  # what was loaded is not shared
            worst = max(worst, at - heir.computed)
        assert 64 < worst <= settings.checkpoint_tokens


class Replica:
    """One after the other over one disk, each with host memory of its own."""

    def __init__(self, disk: FakeDisk) -> None:
        state = {
            "disk": Path("disk"), "disk_bytes": 64 << 20, "host_bytes": 0, "checkpoint_tokens": 64,
            "read_timeout_s": 60.0,
        }  # fmt: skip
        self.woken = Event()
        settings = StateSettings.model_validate(state)
        layout = RUNNER.state.layout
        self.store = TieredStore(layout, settings, disk=disk.log, wake=self.woken.set)
        self.asked = Session(cached(RUNNER, 64, 4, self.store, state, self.woken))
        lookup = self.asked.engine.cache.lookup
        lookup._note_due, lookup._token_s = math.inf, 1.0  # looks at nothing else, and does load

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self.asked.step()
            if not self.asked.engine.has_work:
                wait_for([self.woken])


def test_loads_are_let_go_when_they_are_aborted_and_when_they_have_filled() -> None:
    disk, prompt = FakeDisk(), ids(7, 300)
    first = Replica(disk)
    first.asked.submit("first", prompt, 1)
    first.until(lambda: not first.asked.open)
    assert finished(first.store.flush()).items == []
    first.store.close()
    second = Replica(disk)
    one, store = second.asked, second.store
    one.step()  # sessions are looked for
    second.until(lambda: not one.engine.has_work and store.in_use == (0, 0, 0))
    disk.reading.clear()
    one.submit("aborted", prompt)
    second.until(lambda: bool(disk.started))
    fetches, _, reserved = store.in_use
    assert fetches and reserved
    one.engine.abort("aborted")
    one.step()
    assert one.answers["aborted"].finish_reason == "abort"
    assert store.in_use == (0, 0, 0)
    del one.requests["aborted"]
    disk.reading.set()
    one.submit("again", prompt)
    second.until(lambda: bool(one.engine.scheduler.running))
    assert one.open == ["again"] and store.in_use == (0, 0, 0)
    second.until(lambda: not one.open)
    one.check_all()
    assert one.cached["again"] == 256
    store.close()
