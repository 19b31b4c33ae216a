"""A short run of the liveness bench: nothing wrong, late, left or dead in any weather."""

import pytest

from expertmesh.actors.state.tiers import store as tiers_store
from tests.bench import state_liveness


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
    assert result["slow_reads"] > 0, "the disk's latency was not felt"


def test_hits_all_that_can_be_hit_where_there_is_room() -> None:
    rates = state_liveness.against_the_ceiling(300, seed=3)
    assert rates["hit_rate"] == pytest.approx(rates["ceiling"], abs=0.05)
