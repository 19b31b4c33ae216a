"""What /metrics says of cached state: sums that agree, tiers that exist, bounded labels."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.state.offload.spill import REASONS
from expertmesh.actors.state.stats import CacheStats, StoreStats, TierStats
from expertmesh.cluster import metrics
from expertmesh.deploy.openai.telemetry import Telemetry
from tests.deploy.test_telemetry import samples

DISK = TierStats(
    capacity_bytes=10**9, page_bytes=300, snapshot_bytes=70, other_bytes=5, raw_bytes=500, items=9,
    pinned=2, hits=11, misses=3, reads=12, read_bytes=400, read_seconds=0.5, verify_seconds=0.125,
    writes=8, write_bytes=380, write_seconds=0.25, evictions=6, refused=4, queued=1,
    failures={"corrupt": 1, "short": 2}, read_only="no space left",
)  # fmt: skip
CACHE = CacheStats(
    queries=1000, hits=640, hits_by_tier={"hot": 512, "disk": 128}, ceiling=0.75,
    recomputed_state=64, cached_pages=7, lent_pages=6, snapshots=3, snapshots_total=16,
    snapshot_bytes=300, evicted_pages=20, evicted_snapshots=1, loads=5, loads_failed=2,
    load_seconds=1.5, loading=1, loading_bytes=12, checkpoints=9, sessions=4, lost_tips=3,
    offloaded_bytes=40, offload_capacity_bytes=50, spilled_bytes=60, spill_capacity_bytes=80,
    spill_written_bytes=61, spill_read_bytes=90, spill_failures={"io": 2, "full": 0},
    selected_pages=30, skipped_pages=70,
    store=StoreStats(disk=DISK, threads_dead=1, threads_stuck=2),
)  # fmt: skip
STATS = EngineStats(
    pages_total=8, pages_free=2, slots_total=4, slots_free=3, page_bytes=10, slot_bytes=100,
    cache=CACHE,
)  # fmt: skip


@pytest.fixture(scope="module")
def text() -> str:
    stats = {"a": STATS, "b": EngineStats(), "c": None}
    return Telemetry("m", lambda: 0.0).exposition(stats).decode()


def test_the_cache_of_each_engine(text: str) -> None:
    for name, value in (
        ("prefix_cache_queries_total", 1000), ("prefix_cache_hits_total", 640),
        ("prefix_cache_ceiling_perc", 0.75), ("prefix_cache_recomputed_tokens_total", 64),
        ("prefix_cache_pages", 7), ("prefix_cache_lent_pages", 6),
        ("state_loads_total", 5), ("state_loads_failed_total", 2),
        ("state_load_seconds_total", 1.5), ("state_loading", 1), ("state_loading_bytes", 12),
        ("state_checkpoints_total", 9), ("state_sessions", 4), ("state_sessions_lost_total", 3),
        ("state_threads_dead", 1), ("state_threads_stuck", 2),
        ("state_offloaded_bytes", 40), ("state_offload_capacity_bytes", 50),
        ("state_offload_disk_bytes", 60), ("state_offload_disk_capacity_bytes", 80),
    ):  # fmt: skip
        assert samples(text, name) == {"a": value, "b": 0}, name
    read = samples(text, "kv_pages_read_total")
    assert (read["a,exact"], read["a,estimate"]) == (30, 70)
    moved = samples(text, "state_offload_disk_moved_bytes_total")
    assert (moved["a,read"], moved["a,write"]) == (90, 61)
    failed = samples(text, "state_offload_disk_failures_total")
    assert failed["a,io"] == 2 and sum(failed.values()) == 2
    assert metrics.SPILL_FAILURES == REASONS


def test_hits_by_tier_add_up(text: str) -> None:
    found = samples(text, "state_tier_hit_tokens_total")
    assert found == {"a,hot": 512, "a,disk": 128, "b,hot": 0}
    assert found["a,hot"] + found["a,disk"] == samples(text, "prefix_cache_hits_total")["a"]


def test_a_tier_is_there_when_it_has_room(text: str) -> None:
    """Of engine a a disk and no host memory, of b neither."""
    used, room = (samples(text, f"state_tier_{what}_bytes") for what in ("used", "capacity"))
    hot = {"pages": (60, 80), "slots": (100, 400), "snapshots": (300, 1600)}
    for kind, (now, most) in hot.items():
        assert (used[f"a,{kind},hot"], room[f"a,{kind},hot"]) == (now, most)
    disk = {key: value for key, value in used.items() if key.endswith("disk")}
    assert disk == {"a,pages,disk": 300, "a,snapshots,disk": 70, "a,sessions,disk": 5}
    assert room["a,all,disk"] == 10**9
    assert {key.rsplit(",", 1)[1] for key in used} == {"hot", "disk"}
    assert {key.split(",")[0] for key in samples(text, "state_tier_items")} == {"a"}


def test_a_tier_in_numbers(text: str) -> None:
    for name, found in (
        ("items", {"": 9}), ("pinned_items", {"": 2}), ("raw_bytes", {"": 500}),
        ("refused_total", {"": 4}), ("queued", {"": 1}), ("read_only", {"": 1}),
        ("lookups_total", {"hit,": 11, "miss,": 3}),
        ("operations_total", {"read,": 12, "write,": 8}),
        ("moved_bytes_total", {"read,": 400, "write,": 380}),
        ("busy_seconds_total", {"read,": 0.5, "write,": 0.25, "verify,": 0.125}),
    ):  # fmt: skip
        assert samples(text, f"state_tier_{name}") == {
            f"a,{label}disk": value for label, value in found.items()
        }, name
    assert samples(text, "state_tier_evictions_total") == {"a,hot": 21, "b,hot": 0, "a,disk": 6}


def test_every_reason_of_failures_is_there_from_the_start(text: str) -> None:
    found = samples(text, "state_tier_failures_total")
    assert found == dict.fromkeys((f"a,{r},disk" for r in metrics.TIER_FAILURES), 0.0) | {
        "a,corrupt,disk": 1, "a,short,disk": 2,
    }  # fmt: skip


def test_types_and_labels_are_as_defined(text: str) -> None:
    families = {one.name: one for one in text_string_to_metric_families(text)}
    for metric in metrics.SHARED:
        if metric in metrics.MESH:
            continue
        family = families[metric.full_name]
        assert family.type == metric.kind
        for sample in family.samples:
            assert sample.labels.keys() - {"le"} == set(metric.labels)


def test_placements_are_counted_by_reason() -> None:
    telemetry = Telemetry("m", lambda: 0.0)
    assert "router_placements" not in telemetry.exposition({}).decode()
    telemetry.watch_placements()
    telemetry.placed("prefix")
    found = samples(telemetry.exposition({}).decode(), "router_placements_total")
    assert found == {"session": 0, "prefix": 1, "spread": 0, "load": 0}
