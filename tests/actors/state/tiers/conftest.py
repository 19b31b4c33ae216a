"""Stores that are closed after each test, by threads that all have ended."""

from collections.abc import Callable, Iterator

import pytest

from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.tiers import LAYOUT, FakeClock, FakeDisk

Open = Callable[..., TieredStore]


@pytest.fixture
def open_store() -> Iterator[Open]:
    """open_store(disk=, clock=, wake=, **settings)."""
    opened: list[tuple[TieredStore, FakeDisk | None]] = []

    def open_one(
        disk: FakeDisk | None = None,
        clock: FakeClock | None = None,
        wake: Callable[[], None] = lambda: None,
        **settings: object,
    ) -> TieredStore:
        wanted = StateSettings.model_validate({"codec": "raw", **settings})
        more = {} if clock is None else {"clock": clock}
        log = None if disk is None else disk.log
        store = TieredStore(LAYOUT, wanted, disk=log, wake=wake, **more)
        opened.append((store, disk))
        return store

    yield open_one
    for store, disk in opened:
        if disk is not None:  # whatever a test has broken, threads shall end
            disk.reading.set()
            disk.writing.set()
            disk.failing, disk.dying = None, False
        store.close(20.0)
