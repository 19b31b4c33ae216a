"""What engines say of cached state, as metric families: the prefix cache, and each tier."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.state.stats import CacheStats, TierStats
from expertmesh.cluster import metrics
from expertmesh.cluster.metrics import Metric
from expertmesh.deploy.openai.families import Family, Samples, family

# A label's values of one engine or tier.
Named = Mapping[str, float]

_CACHE: tuple[tuple[Metric, Callable[[CacheStats], float]], ...] = (
    (metrics.PREFIX_CACHE_QUERIES, lambda c: c.queries),
    (metrics.PREFIX_CACHE_HITS, lambda c: c.hits),
    (metrics.PREFIX_CACHE_CEILING, lambda c: c.ceiling),
    (metrics.PREFIX_CACHE_RECOMPUTED, lambda c: c.recomputed_state),
    (metrics.PREFIX_CACHE_PAGES, lambda c: c.cached_pages),
    (metrics.PREFIX_CACHE_LENT, lambda c: c.lent_pages),
    (metrics.STATE_LOADS, lambda c: c.loads),
    (metrics.STATE_LOADS_FAILED, lambda c: c.loads_failed),
    (metrics.STATE_LOAD_SECONDS, lambda c: c.load_seconds),
    (metrics.STATE_LOADING, lambda c: c.loading),
    (metrics.STATE_LOADING_BYTES, lambda c: c.loading_bytes),
    (metrics.STATE_CHECKPOINTS, lambda c: c.checkpoints),
    (metrics.STATE_SESSIONS, lambda c: c.sessions),
    (metrics.STATE_SESSIONS_LOST, lambda c: c.lost_tips),
    (metrics.STATE_OFFLOADED_BYTES, lambda c: c.offloaded_bytes),
    (metrics.STATE_OFFLOAD_CAPACITY, lambda c: c.offload_capacity_bytes),
    (metrics.STATE_SPILLED_BYTES, lambda c: c.spilled_bytes),
    (metrics.STATE_SPILL_CAPACITY, lambda c: c.spill_capacity_bytes),
    (metrics.STATE_THREADS_DEAD, lambda c: c.store.threads_dead),
    (metrics.STATE_THREADS_STUCK, lambda c: c.store.threads_stuck),
)
_CACHE_BY: tuple[tuple[Metric, Callable[[CacheStats], Named]], ...] = (
    (metrics.TIER_HIT_TOKENS, lambda c: {"hot": 0, **c.hits_by_tier}),
    (metrics.KV_PAGES_READ, lambda c: {"exact": c.selected_pages, "estimate": c.skipped_pages}),
    (
        metrics.STATE_SPILL_MOVED,
        lambda c: {"read": c.spill_read_bytes, "write": c.spill_written_bytes},
    ),
    (
        metrics.STATE_SPILL_FAILED,
        lambda c: {**dict.fromkeys(metrics.SPILL_FAILURES, 0), **c.spill_failures},
    ),
)
_TIER: tuple[tuple[Metric, Callable[[TierStats], float]], ...] = (
    (metrics.TIER_ITEMS, lambda t: t.items),
    (metrics.TIER_PINNED, lambda t: t.pinned),
    (metrics.TIER_RAW_BYTES, lambda t: t.raw_bytes),
    (metrics.TIER_REFUSED, lambda t: t.refused),
    (metrics.TIER_QUEUED, lambda t: t.queued),
    (metrics.TIER_READ_ONLY, lambda t: float(bool(t.read_only))),
)
_TIER_BY: tuple[tuple[Metric, Callable[[TierStats], Named]], ...] = (
    (metrics.TIER_LOOKUPS, lambda t: {"hit": t.hits, "miss": t.misses}),
    (metrics.TIER_OPERATIONS, lambda t: {"read": t.reads, "write": t.writes}),
    (metrics.TIER_MOVED_BYTES, lambda t: {"read": t.read_bytes, "write": t.write_bytes}),
    (
        metrics.TIER_BUSY_SECONDS,
        lambda t: {"read": t.read_seconds, "write": t.write_seconds, "verify": t.verify_seconds},
    ),
    # Zeros too: a rate needs to have seen a counter before it grows.
    (metrics.TIER_FAILED, lambda t: {**dict.fromkeys(metrics.TIER_FAILURES, 0), **t.failures}),
)


def state_families(model: str, stats: Mapping[str, EngineStats]) -> Iterator[Family]:
    """stats: by engine, of those that are up."""
    engines = {engine: ([model, engine], one) for engine, one in stats.items()}
    for metric, value in _CACHE:
        yield family(metric, ((labels, value(s.cache)) for labels, s in engines.values()))
    for metric, values in _CACHE_BY:
        yield family(metric, _by((labels, values(s.cache)) for labels, s in engines.values()))
    tiers = [
        ([*labels, tier], one)
        for labels, s in engines.values()
        for tier, one in lower_tiers(s).items()
    ]
    for metric, read in _TIER:
        yield family(metric, ((labels, read(tier)) for labels, tier in tiers))
    for metric, reads in _TIER_BY:
        yield family(metric, _by((labels, reads(tier)) for labels, tier in tiers))
    yield family(metrics.TIER_EVICTIONS, _evictions(engines.values(), tiers))
    yield family(
        metrics.TIER_USED_BYTES,
        _by((labels, kinds) for e in engines.values() for labels, kinds in _used(*e)),
    )
    yield family(
        metrics.TIER_CAPACITY_BYTES,
        _by((labels, kinds) for e in engines.values() for labels, kinds in _capacity(*e)),
    )


def lower_tiers(stats: EngineStats) -> dict[str, TierStats]:
    """By name, the tiers below the device that there are."""
    store = stats.cache.store
    found = {tier: getattr(store, tier) for tier in metrics.LOWER_TIERS}
    return {tier: one for tier, one in found.items() if one.capacity_bytes}


def used_bytes(tier: TierStats) -> Named:
    """By kind."""
    return {
        "pages": tier.page_bytes, "snapshots": tier.snapshot_bytes, "sessions": tier.other_bytes
    }  # fmt: skip


def _by(found: Iterable[tuple[list[str], Named]]) -> Samples:
    return (([*labels, name], value) for labels, values in found for name, value in values.items())


def _used(labels: list[str], s: EngineStats) -> Iterator[tuple[list[str], Named]]:
    yield (
        [*labels, "hot"],
        {
            "pages": (s.pages_total - s.pages_free) * s.page_bytes,
            "slots": (s.slots_total - s.slots_free) * s.slot_bytes,
            "snapshots": s.cache.snapshot_bytes,
        },
    )
    for name, tier in lower_tiers(s).items():
        yield [*labels, name], used_bytes(tier)


def _capacity(labels: list[str], s: EngineStats) -> Iterator[tuple[list[str], Named]]:
    yield (
        [*labels, "hot"],
        {
            "pages": s.pages_total * s.page_bytes,
            "slots": s.slots_total * s.slot_bytes,
            "snapshots": s.cache.snapshots_total * s.slot_bytes,
        },
    )
    for name, tier in lower_tiers(s).items():
        yield [*labels, name], {"all": tier.capacity_bytes}


def _evictions(
    engines: Iterable[tuple[list[str], EngineStats]], tiers: list[tuple[list[str], TierStats]]
) -> Samples:
    for labels, s in engines:
        yield [*labels, "hot"], s.cache.evicted_pages + s.cache.evicted_snapshots
    for labels, tier in tiers:
        yield labels, tier.evictions
