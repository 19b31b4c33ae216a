"""Background threads of the tiers that hang or die: requests go on without them, and it is told.

The rest of case D8, whose loads are slow or fail, is in test_state_cases.
"""

import math
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import pytest

from expertmesh.actors.attention import engine as engine_module
from expertmesh.actors.attention.loop import EngineLoop
from expertmesh.actors.attention.messages import TokenOutput
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers import loads, packer, writer
from expertmesh.actors.state.tiers import store as tiers_store
from expertmesh.actors.state.tiers.content import Stored
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.engines import request
from tests.support.state_below import STALL_S, wait_for
from tests.support.state_model import cached, small_model
from tests.support.state_session import Session, ids
from tests.support.tiers import FakeDisk, until


class OverTiers:
    """An engine whose loads come from real tiers, over what others have left on a disk."""

    def __init__(self, disk: FakeDisk | None) -> None:
        state: dict[str, Any] = {
            "host_bytes": 64 << 20, "checkpoint_tokens": 64, "snapshots": 4, "read_timeout_s": 0.1,
            "write_timeout_s": 0.1, "codec": "raw",
        }  # fmt: skip
        if disk is not None:
            state |= {"disk": Path("disk"), "disk_bytes": 64 << 20}
        runner, self.woken = small_model(), Event()
        self.store = TieredStore(
            runner.state.layout, StateSettings(**state), disk=disk and disk.log,
            wake=self.woken.set,
        )  # fmt: skip
        self.one = Session(cached(runner, 12, 4, self.store, state, self.woken))
        lookup = self.one.engine.cache.lookup
        lookup._note_due, lookup._token_s = math.inf, 1.0  # loads whatever can be loaded

    def finish(self) -> None:
        deadline = monotonic() + STALL_S
        while self.one.open:
            assert monotonic() < deadline, self.one.engine.stats()
            self.one.step()
            if not self.one.engine.has_work:
                wait_for([self.woken])


def hang(thread: str, disk: FakeDisk, patch: pytest.MonkeyPatch) -> Event:
    """All threads of that name hang in their next step, until the event is set."""
    gate = {"disk-read": disk.reading, "disk-write": disk.writing}.get(thread, Event())
    gate.clear()
    place, name = (packer, "store_packed") if thread == "pack" else (Stored, "verified")
    as_it_was = getattr(place, name)

    def waits(*arguments: Any) -> Any:
        assert gate.wait(STALL_S)
        return as_it_was(*arguments)

    if thread in ("pack", "host-read"):
        patch.setattr(place, name, waits)
    return gate


@pytest.mark.parametrize("thread", ["disk-read", "disk-write", "host-read", "pack"])
def test_a_thread_that_hangs_stalls_nobody_and_is_told(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_store, "STUCK_S", 0.3)
    for module in (loads, packer, writer):
        monkeypatch.setattr(module, "_IDLE_S", 0.05)
    disk = FakeDisk()
    prompts = [ids(60 + i, 64 * (2 + i % 4) + 5) for i in range(6)]
    first = OverTiers(disk)
    for i, prompt in enumerate(prompts):
        first.one.submit(f"first{i}", prompt, 2)
    first.finish()
    until(lambda: not first.store.stats().host.queued)
    flush = first.store.flush()
    until(lambda: flush.done)
    until(lambda: first.store.stats().threads_stuck == 0)
    here = first
    if thread == "disk-read":  # another process, whose host memory has nothing
        first.store.close(STALL_S)
        here = OverTiers(disk)
    here.one.engine.cache.evict()
    gate = hang(thread, disk, monkeypatch)
    for i in range(30):
        here.one.submit(f"r{i}", prompts[i % 6] + ids(90 + i % 4, i % 3), 1)
    here.one.submit("new", ids(96, 400), 1)  # which is to be packed and written
    here.finish()
    here.one.check_all()
    failed = here.one.engine.stats().cache.loads_failed
    assert bool(failed) == (thread in ("disk-read", "host-read"))
    until(lambda: here.store.stats().threads_stuck > 0)
    assert here.store.stats().threads_dead == 0
    gate.set()
    until(lambda: here.store.stats().threads_stuck == 0)
    here.store.close(STALL_S)


def test_a_load_that_nobody_ends_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The readers hang, and the thread that should tell is dead: no event comes any more."""
    monkeypatch.setattr(engine_module, "LOAD_LOOK_S", 0.05)
    here = OverTiers(None)
    here.one.submit("first", ids(60, 300), 1)
    here.finish()
    until(lambda: not here.store.stats().host.queued)
    here.one.engine.cache.evict()

    def dies() -> None:
        raise SystemExit("a thread dies")

    monkeypatch.setattr(here.store._loads, "tick", dies)
    until(lambda: here.store.stats().threads_dead == 1)
    gate = hang("host-read", FakeDisk(), monkeypatch)
    ended, outputs = Event(), list[TokenOutput]()

    def publish(made: list[TokenOutput]) -> None:
        outputs.extend(made)
        if made[-1].finish_reason is not None:
            ended.set()

    loop = EngineLoop(here.one.engine, publish)
    loop.start()
    here.one.engine.submit(request("again", ids(60, 300), 1))
    loop.wake()
    assert ended.wait(STALL_S) and outputs[-1].cached_tokens == 0
    assert here.one.engine.stats().cache.loads_failed == 1
    gate.set()
    loop.stop()
    here.store.close(STALL_S)
