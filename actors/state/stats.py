"""Counters of cached state, as they travel to /metrics and to operators."""

import msgspec


class TierStats(msgspec.Struct, kw_only=True):
    """Of one tier below the device. Bytes are those in use, packed. read_only: why it takes no
    more, "" when it does. failures: by reason (missing, corrupt, sealed, timeout, io, full,
    busy)."""

    capacity_bytes: int = 0
    page_bytes: int = 0
    snapshot_bytes: int = 0
    other_bytes: int = 0
    raw_bytes: int = 0  # of the same items before packing
    items: int = 0
    pinned: int = 0
    hits: int = 0
    misses: int = 0
    reads: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    verify_seconds: float = 0.0
    writes: int = 0
    write_bytes: int = 0
    write_seconds: float = 0.0
    evictions: int = 0
    refused: int = 0
    queued: int = 0
    failures: dict[str, int] = msgspec.field(default_factory=dict)
    read_only: str = ""


class StoreStats(msgspec.Struct, kw_only=True):
    """threads_dead: background threads that have ended by an error; must be 0. threads_stuck: those
    that hang, such as in a read that the device never answers."""

    host: TierStats = msgspec.field(default_factory=TierStats)
    disk: TierStats = msgspec.field(default_factory=TierStats)
    threads_dead: int = 0
    threads_stuck: int = 0


class CacheStats(msgspec.Struct, kw_only=True):
    """Of the prefix cache on the device, with the tiers below it.

    queries, hits: tokens of prompts looked up, and of those not computed again; hits by the tier
    that they came from. ceiling: share of prompt tokens that a cache without limits would have
    known. recomputed_state: tokens whose latents were known and whose recurrent state was not.
    lost_tips: requests whose session's state was gone when they were to begin from it, or again.
    offloaded_bytes: host memory that running sequences fill with pages that are off the device, of
    offload_capacity_bytes; no part of the tiers below. spill: of the disk below that memory.
    """

    queries: int = 0
    hits: int = 0
    hits_by_tier: dict[str, int] = msgspec.field(default_factory=dict)
    ceiling: float = 0.0
    recomputed_state: int = 0
    lost_tips: int = 0
    nodes: int = 0
    cached_pages: int = 0
    lent_pages: int = 0  # of these, what holds snapshots that have no place of their own
    snapshots: int = 0
    snapshots_total: int = 0
    snapshot_bytes: int = 0
    evicted_pages: int = 0
    evicted_snapshots: int = 0
    loads: int = 0
    loads_failed: int = 0
    load_seconds: float = 0.0
    loading: int = 0
    loading_bytes: int = 0  # unpacked, that queued requests have loaded or wait for
    checkpoints: int = 0
    sessions: int = 0
    offloaded_bytes: int = 0
    offload_capacity_bytes: int = 0
    spilled_bytes: int = 0
    spill_capacity_bytes: int = 0
    spill_written_bytes: int = 0
    spill_read_bytes: int = 0
    spill_failures: dict[str, int] = msgspec.field(default_factory=dict)
    selected_pages: int = 0  # read exactly by query-driven steps
    skipped_pages: int = 0  # taken as an estimate by them
    store: StoreStats = msgspec.field(default_factory=StoreStats)
