"""The tiers of an engine's state as the dashboard's page lists them."""

from typing import Any

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.deploy.openai.state_telemetry import lower_tiers, used_bytes


def hot_tier(stats: EngineStats) -> list[tuple[str, int, int, int]]:
    """(kind, how many are in use, how many there are, bytes of each), on the device."""
    cache = stats.cache
    return [
        ("pages", stats.pages_total - stats.pages_free, stats.pages_total, stats.page_bytes),
        ("slots", stats.slots_total - stats.slots_free, stats.slots_total, stats.slot_bytes),
        ("snapshots", cache.snapshots, cache.snapshots_total, stats.slot_bytes),
    ]


def tiers_of(stats: EngineStats) -> list[dict[str, Any]]:
    """Bytes by tier and kind, from the device down. total: the room; of tiers that all kinds share,
    the tier's. shared: other engines may be telling of the same bytes. closed: why nothing more is
    taken, "" when it is."""
    found: list[dict[str, Any]] = [
        {"tier": "hot", "kind": kind, "used": count * each, "total": of * each}
        for kind, count, of, each in hot_tier(stats)
        if of
    ]
    for name, tier in lower_tiers(stats).items():
        found += [
            {
                "tier": name,
                "kind": kind,
                "used": used,
                "total": tier.capacity_bytes,
                "shared": name == "disk",
                "closed": tier.read_only,
            }
            for kind, used in used_bytes(tier).items()
            if used or kind == "pages"
        ]
    return found
