"""A short run of the liveness bench: nothing wrong, late, left or dead in any weather."""

import pytest

from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers import store as tiers_store
from expertmesh.actors.state.tiers.store import TieredStore
from tests.bench import state_liveness
from tests.support.slow_disk import SlowDisk
from tests.support.tiers import LAYOUT, FakeClock, names, pages, put, until


def test_survives_all_weather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers_store, "TRANSIT_BYTES", 0)
    monkeypatch.setattr(state_liveness, "OPERATION_S", 0.05)
    monkeypatch.setattr(state_liveness, "WEATHER", 200)
    result = state_liveness.soak(2800, seed=7)
    assert len(result["weather"]) == 10
    assert result["wrong_bytes"] == 0 and result["threads_dead"] == 0
    assert result["references_left"] == [0, 0, 0] and result["problems_afterwards"] == []
    assert result["delay_max_s"] <= state_liveness.DEADLINE_S + 0.06
    assert result["fetches"]["loaded"] > 0


def test_the_latency_of_its_disk_is_felt() -> None:
    """By the reads that a store makes, whatever they are called."""
    clock, settings = FakeClock(), StateSettings(host_bytes=0)
    disk = SlowDisk(clock=clock)
    first = TieredStore(LAYOUT, settings, disk=disk.log, clock=clock)
    items = pages("slow", 2)
    assert put(first, items, durable=True)
    flush = first.flush()
    until(lambda: flush.done)
    first.close()
    disk.latency_s = 1.0
    later = TieredStore(LAYOUT, settings, disk=disk.log, clock=clock)
    fetch = later.fetch(names(items), 60.0)
    until(lambda: disk.slow_reads > 0)
    assert not fetch.done
    clock.now += 2.0
    until(lambda: fetch.done)
    assert fetch.items is not None
    fetch.cancel()
    later.close()


def test_hits_all_that_can_be_hit_where_there_is_room() -> None:
    rates = state_liveness.against_the_ceiling(300, seed=3)
    assert rates["hit_rate"] == pytest.approx(rates["ceiling"], abs=0.05)
