"""The benchmarks that need no peer, run for a moment: they must measure and agree, not be fast."""

import json
from typing import Any

import pytest

from tests.bench import http, profile, two_tier
from tests.bench.workers import protocol


def test_profile_splits_the_step_by_part() -> None:
    result = profile.main(
        ["--models", "tiny", "--modes", "one_process", "--concurrency", "3", "--steps", "4"]
    )
    (row,) = result["results"]
    assert row["step_ms"] > 0 and row["tokens_per_s"] > 0
    inside = sum(row["parts_ms"].values())
    assert 0.5 * row["step_ms"] < inside <= 1.01 * row["step_ms"]
    # tiny: three layers, the last one MLA, the first one dense, the others MoE
    calls = row["calls"]
    assert (calls["attention: KDA"], calls["attention: MLA"], calls["experts"]) == (2, 1, 2)
    json.dumps(result)


def test_two_tier_compares_systems_that_agree() -> None:
    result = two_tier.main(
        ["--models", "tiny", "--shapes", "bare_mesh", "--threads", "1", "--concurrency", "2",
         "--repetitions", "1", "--new", "6"]
    )  # fmt: skip
    measured = result["models"]["tiny"]
    assert all(row["same_ids"] == 1.0 for row in measured["results"]["2"].values())
    assert measured["ratios"]["bare_mesh / best_one_process"]["2"] > 0
    json.dumps(result)


def test_http_streams_what_the_engine_generates() -> None:
    result = http.main(
        ["--model", "tiny", "--shapes", "one_process", "--concurrency", "2", "--repetitions", "1",
         "--new", "6"]
    )  # fmt: skip
    measured = result["shapes"]["one_process"]
    assert measured["results"]["2"]["http"]["same_ids"] == 1.0
    assert measured["ratios"]["decode_tokens_per_s"]["2"] > 0
    json.dumps(result)


def test_decode_rate_counts_only_while_all_requests_generate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: now)
    clock = protocol.Clock(2)
    events: list[tuple[float, Any]] = [
        (1.0, lambda: clock.ids(1, first_of=1)),  # a starts
        (2.0, lambda: clock.ids(1)),  # a alone
        (3.0, lambda: clock.ids(1, first_of=1)),  # b starts: from here on
        (4.0, lambda: clock.ids(2)),
        (5.0, lambda: clock.ids(2)),
        (5.0, clock.finished),  # a ends: up to here
        (9.0, lambda: clock.ids(1)),
        (9.0, clock.finished),
    ]
    for now, event in events:  # noqa: B007 (read by the patched clock)
        event()
    timing = clock.timing([[7, 7, 7, 7], [7, 7, 7, 7]])
    assert timing["prefill_s"] == 3.0
    assert timing["decode_tokens_per_s"] == 4 / 2.0
    assert timing["total_tokens_per_s"] == 8 / 9.0
