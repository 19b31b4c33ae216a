"""The front door's counters: what they add up to, their types, buckets and bounds."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.attention.timings import Timings
from expertmesh.cluster import metrics
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.measures import imbalance, layer_rank_loads
from expertmesh.cluster.placement import Placement
from expertmesh.deploy.admission.meter import Meter
from expertmesh.deploy.auth.keys import ApiKey, hash_key
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.served import Limits, ServedModel
from expertmesh.deploy.openai.telemetry import Telemetry
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server
from tests.support.server_process import wait_for

COMPLETIONS = "/v1/completions"
LATENCIES_S = (0.001, 1.0, 100.0)
TOKENS = (1, 1000, 128_000)


@contextmanager
def serving(served: ServedModel, **limits: Any) -> Iterator[tuple[Door, FakeEngineClient]]:
    client = FakeEngineClient(vocab_size=320)
    front = Front(client, replace(served, limits=Limits(**limits)))
    with http_server(build_app(front)) as url, Door(url) as door:
        yield door, client


def samples(text: str, name: str) -> dict[str, float]:
    """Of one metric, by all its labels but the model's name."""
    return {
        ",".join(v for k, v in sorted(one.labels.items()) if k != "model_name"): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == f"expertmesh_{name}"
    }


# --- tokens ---------------------------------------------------------------------------------------


def test_tokens_counted_are_the_usage_that_was_told(served: ServedModel) -> None:
    """For any number of choices, streamed or not; a prompt counts once for all its choices."""
    with serving(served) as (door, _):
        prompt = generated = 0
        for n in (1, 2, 8):
            for body in ({}, {"stop": "l"}, {"max_tokens": 0, "echo": True, "logprobs": 1}):
                usage = door.complete("hello world", **{"n": n, "max_tokens": 6} | body)["usage"]
                prompt += usage["prompt_tokens"]
                generated += usage["completion_tokens"]
            events = door.events(
                COMPLETIONS, prompt=["one", "two"], n=n, max_tokens=5,
                stream_options={"include_usage": True},
            )  # fmt: skip
            prompt += events[-1]["usage"]["prompt_tokens"]
            generated += events[-1]["usage"]["completion_tokens"]
        text = door.http.get("/metrics").text
        assert samples(text, "prompt_tokens_total") == {"": prompt}
        assert samples(text, "generation_tokens_total") == {"": generated}
        assert samples(text, "request_prompt_tokens_sum") == {"": prompt}
        assert samples(text, "request_generation_tokens_sum") == {"": generated}
        assert samples(text, "request_generation_tokens_count") == {"": 12}
        success = samples(text, "request_success_total")
        assert sum(success.values()) == (1 + 2 + 8) * 5, (
            "choices, of one prompt thrice, of two once"
        )


def test_what_got_no_answer_counts_no_tokens(served: ServedModel) -> None:
    with serving(served) as (door, client):
        door.refused(COMPLETIONS, prompt="x", temperature=-1)
        door.refused(COMPLETIONS, 404, prompt="x", model="absent")
        client.fail_after = 2
        door.refused(COMPLETIONS, 503, prompt="x", max_tokens=5, ignore_eos=True)
        client.fail_after, client.seconds = None, 0.02
        body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "n": 2, "stream": True}
        with httpx.stream("POST", door.url + COMPLETIONS, content=json.dumps(body)) as answer:
            next(answer.iter_bytes())
        wait_for(lambda: client.running == 0, 10)
        wait_for(lambda: _failures(door)["cancelled"] == 1, 10)
        text = door.http.get("/metrics").text
        assert samples(text, "prompt_tokens_total") == {"": 0}
        assert samples(text, "generation_tokens_total") == {"": 0}
        failures = {kind: n for kind, n in _failures(door).items() if n}
        assert failures == {"validation": 1, "not_found": 1, "unavailable": 1, "cancelled": 1}
        assert set(_failures(door)) == set(metrics.ERROR_TYPES), "zeros are shown"


def test_a_key_beyond_its_limits_is_no_error_of_the_server() -> None:
    """No alert for clients that are told what their key may; a full queue is the server's."""
    telemetry, now = Telemetry("tiny", lambda: 0.0), 100.0
    for limit in ("requests_in_flight", "requests_per_minute", "tokens_per_minute"):
        meter = Meter()
        key = ApiKey.model_validate({"name": "a", "hash": hash_key("a"), limit: 1})
        meter.begin(now, 1, 1)
        with pytest.raises(ApiError) as refused:
            meter.check(key, now)
        telemetry.failed(refused.value)
    telemetry.failed(ApiError(429, "full", code="queue_full"))
    counts = samples(telemetry.exposition({}).decode(), "request_failures_total")
    assert {kind: n for kind, n in counts.items() if n} == {"rate_limit": 3, "overload": 1}
    assert telemetry.totals() == {"answers": 0, "errors": 1, "others": 3}
    assert "rate_limit" not in metrics.SERVER_ERRORS


def _failures(door: Door) -> dict[str, float]:
    return samples(door.http.get("/metrics").text, "request_failures_total")


def test_every_status_has_its_kind(served: ServedModel) -> None:
    with serving(served, request_seconds=0.2) as (door, client):
        client.seconds = 0.05
        door.refused(COMPLETIONS, 504, prompt="x", max_tokens=100)
        client.refuse = RuntimeError("a bug")
        door.refused(COMPLETIONS, 500, prompt="x")
        client.down = "gone"
        door.refused(COMPLETIONS, 503, prompt="x")
        failures = {kind: n for kind, n in _failures(door).items() if n}
        assert failures == {"timeout": 1, "internal": 1, "unavailable": 1}


# --- instruments ----------------------------------------------------------------------------------


def _bucket(bounds: tuple[float, ...], value: float) -> int:
    return next(i for i, bound in enumerate([*bounds, float("inf")]) if value <= bound)


@pytest.mark.parametrize("metric", [m for m in metrics.ALL if m.kind == "histogram"],
                         ids=lambda metric: metric.name)  # fmt: skip
def test_a_millisecond_a_second_and_a_hundred_are_told_apart(metric: metrics.Metric) -> None:
    """And one token, a thousand, and the longest prompts: each in a finite bucket of its own.
    Steps have at most some thousand tokens."""
    assert list(metric.buckets) == sorted(set(metric.buckets))
    values = LATENCIES_S if metric.name.endswith("_seconds") else TOKENS
    if metric is metrics.ITERATION_TOKENS:
        values = (1, 100, 16_000)
    found = [_bucket(metric.buckets, value) for value in values]
    assert len(set(found)) == 3 and max(found) < len(metric.buckets)


def test_observed_seconds_land_where_they_belong() -> None:
    telemetry = Telemetry("m", lambda: 0.0)
    for value in LATENCIES_S:
        telemetry.first_token(value)
        telemetry.between_tokens(value)
    timings = Timings()
    for value in LATENCIES_S:
        timings.queue.observe(value)
    text = telemetry.exposition({"0": EngineStats(timings=timings)}).decode()
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds",
                 "request_queue_time_seconds"):  # fmt: skip
        cumulative = list(samples(text, f"{name}_bucket").values())
        steps = [b - a for a, b in zip([0.0, *cumulative], cumulative, strict=False)]
        assert sorted(steps, reverse=True)[:4] == [1, 1, 1, 0] and steps[-1] == 0
        assert sum(samples(text, f"{name}_sum").values()) == pytest.approx(101.001)


def test_ratios_are_between_0_and_1_and_named_so() -> None:
    stats = EngineStats(pages_total=8, pages_free=2, slots_total=4, slots_free=4, page_bytes=10,
                        slot_bytes=100)  # fmt: skip
    text = Telemetry("m", lambda: 0.0).exposition({"a": stats, "b": EngineStats()}).decode()
    for family in text_string_to_metric_families(text):
        if family.name.endswith(("_perc", "_ratio", "_balancedness", "_entropy_min")):
            assert family.type == "gauge"
            assert all(0 <= one.value <= 1 for one in family.samples)
    assert samples(text, "kv_cache_usage_perc") == {"a": 0.75, "b": 0.0}
    used = samples(text, "state_tier_used_bytes")
    assert used["a,pages,hot"] == 60 and used["a,slots,hot"] == 0
    assert samples(text, "state_tier_capacity_bytes")["a,slots,hot"] == 400
    assert {key.rsplit(",", 1)[1] for key in used} == {"hot"}, "no tier that does not exist"
    assert "64,a,8" in samples(text, "cache_config_info")


def test_balance_is_over_ranks_not_layers_and_never_nan() -> None:
    """Loads [[10, 2], [10, 2]], two layers by two ranks: 0.6; the wrong axis would give 1."""
    placement = Placement({1: ((0,), (1,)), 2: ((0,), (1,))})
    loads = np.array([[10.0, 2.0], [10.0, 2.0]])
    ranks = layer_rank_loads(loads, (1, 2), placement)
    assert [1 / ratio for row in ranks if (ratio := imbalance(row))] == pytest.approx([0.6, 0.6])
    idle = Ledger((1, 2), 2, 1)
    assert idle.routing_stats(placement).balancedness_mean is None
    overview = idle.overview(placement, ["expert-0", "expert-1"])
    assert all(layer.imbalance is None and layer.ranks == [] for layer in overview.layers)
    alone = Placement({1: ((0, 1),), 2: ((0, 1),)})
    assert [imbalance(row) for row in layer_rank_loads(loads, (1, 2), alone)] == [1.0, 1.0]
