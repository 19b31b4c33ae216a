"""Memory does not grow with what an engine has served: no view keeps alive what it is a part of,
and no table remembers what is gone (kv-state section 4, row 23). A bench measures a million
operations of the tiers alone: python -m tests.bench state_liveness."""

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.offload.context import HostPage
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.engines import check_idle, collect, request
from tests.support.state_model import VOCAB, cached, small_model

RUNNER = small_model(3)
PAGE = RUNNER.state.page_bytes
DOCUMENTS = [[random.Random(each).randrange(VOCAB) for _ in range(520)] for each in range(12)]
REQUESTS = 42
# What is in use at one moment and not at another; it does not add up.
SLACK = 16 * PAGE


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Everything is short, so that all of it has been full before it is looked at."""
    state = {
        "host_bytes": 20 * PAGE, "disk": tmp_path, "disk_bytes": 64 << 20, "snapshots": 3,
        "window_tokens": 64, "offload_bytes": 6 * PAGE, "offload_disk_bytes": 30 * PAGE,
        "offload_disk_tokens": 64, "select_pages": 2, "codec": "raw",
    }  # fmt: skip
    settings = StateSettings.model_validate(state)
    layout = RUNNER.state.layout
    disk = DiskLog.open(
        tmp_path, capacity=2 << 20, layout=layout.fingerprint, segment_bytes=256 << 10
    )
    store = TieredStore(layout, settings, disk=disk, wake=lambda: None, transit_bytes=20 * PAGE)
    made = cached(RUNNER, 16, 3, store, state, step_tokens=128)
    made._contexts._offload.fit_pages = 2  # type: ignore[union-attr]
    yield made
    store.close()


def serve(engine: Engine, rng: random.Random) -> None:
    for number in range(REQUESTS):
        length = rng.randrange(65, 520)
        mode = rng.choice(("", "offload", "select"))
        made = request(f"r{number}", rng.choice(DOCUMENTS)[:length], rng.randrange(1, 4))
        engine.submit(msgspec.structs.replace(made, kv_mode=mode, tenant=f"t{rng.randrange(2)}"))
        if rng.random() < 0.1:
            engine.abort(made.request_id)
        while number % 3 == 2 and (engine.has_work or engine.inbox.names):
            if not collect_step(engine):
                engine.arrived.wait(0.01)
    check_idle(engine)


def collect_step(engine: Engine) -> bool:
    outputs = engine.step()
    collect(outputs, {})
    assert engine.failed is None
    return bool(outputs) or bool(engine.scheduler.running)


def held() -> int:
    """Bytes of all tensors, each with its whole storage, and of all that Python and numpy have."""
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and (storage := each.untyped_storage()).nbytes()
    }
    return sum(storages.values()) + tracemalloc.get_traced_memory()[0]


def grown(engine: Engine, series: int) -> int:
    """After so many series of requests and as many again."""
    rng = random.Random(5)
    tracemalloc.start()
    try:
        for _ in range(series):
            serve(engine, rng)
        before = held()
        for _ in range(series):
            serve(engine, rng)
        return held() - before
    finally:
        tracemalloc.stop()


def test_what_was_served_is_not_remembered(engine: Engine) -> None:
    more = grown(engine, 2)
    cache = engine.stats().cache
    assert cache.evicted_pages > 100 and cache.store.host.evictions > 100
    assert cache.spill_written_bytes > 0 and cache.selected_pages > 0 and cache.hits > 0
    assert more < SLACK


def test_a_view_that_stays_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, made = list[torch.Tensor](), HostPage.__init__

    def keeping(page: HostPage, rows: torch.Tensor) -> None:
        made(page, rows)
        if len(kept) < 1000:
            kept.append(rows[0, 0])

    monkeypatch.setattr(HostPage, "__init__", keeping)
    assert grown(engine, 1) > 4 * SLACK
