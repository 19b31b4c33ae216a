"""The serving dashboard's row about cached state: what it saves, where it is, how tiers are."""

from expertmesh.cluster import metrics as m
from expertmesh.deploy.observability.panels import Panel, Row, Target
from expertmesh.deploy.observability.promql import Query, over, per, total

Q = Query("$__rate_interval", variables=True)
NOTHING_LOADED = "nothing has been brought back from below the device"
NO_DISK = "only a server with --state-dir has a disk tier"
NO_REPLICAS = "only a server with replicas chooses among them"


def _by_tier(metric: m.Metric, *more: str, words: str = "") -> Target:
    """A counter's rate; more: labels besides the tier."""
    legend = " ".join(f"{{{{{label}}}}}" for label in ("tier", *more))
    return Target(total(Q.rate(metric), "tier", *more), f"{legend} {words}".rstrip())


def _by_engine(metric: m.Metric, *more: str, words: str = "") -> Target:
    """Of the disk: its folder is shared, so the engines' must not be added up."""
    legend = " ".join(f"{{{{{label}}}}}" for label in ("engine", *more))
    found = over("max", Q.select(metric, tier="=disk"), "engine", *more)
    return Target(found, f"{legend} {words}".rstrip())


def _rate_of(metric: m.Metric, op: str) -> str:
    return total(Q.rate(metric, op=f"={op}"), "tier")


CACHED = Row(
    "Cached state",
    (
        Panel(
            "Prompt tokens not computed again",
            "Share of the tokens looked up; the ceiling is what a cache without limits would have "
            "known, by estimate.",
            (
                Target(
                    per(total(Q.rate(m.PREFIX_CACHE_HITS)), total(Q.rate(m.PREFIX_CACHE_QUERIES))),
                    "hits",
                ),
                Target(over("max", Q.select(m.PREFIX_CACHE_CEILING)), "ceiling"),
            ),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Where hits were",
            "Tokens that were not computed again, by the tier they came from.",
            (_by_tier(m.TIER_HIT_TOKENS),),
            unit="suffix: tok/s",
            stacked=True,
        ),
        Panel(
            "Prompt tokens looked up",
            "All of them, and those computed again although their latents were cached: a snapshot "
            "was missing.",
            (
                Target(total(Q.rate(m.PREFIX_CACHE_QUERIES)), "looked up"),
                Target(total(Q.rate(m.PREFIX_CACHE_RECOMPUTED)), "no snapshot"),
            ),
            unit="suffix: tok/s",
        ),
        Panel(
            "Why a replica got a request",
            "session, prefix: for what it has cached; spread: those that have something cached "
            "have too much to do; load: nobody has.",
            (Target(total(Q.rate(m.PLACEMENTS), "reason"), "{{reason}}"),),
            unit="reqps",
            stacked=True,
            may_be_empty=NO_REPLICAS,
        ),
        Panel(
            "Loads from below",
            "Prefixes that were to be brought to the device; those that failed were computed.",
            (
                Target(total(Q.rate(m.STATE_LOADS)), "begun"),
                Target(total(Q.rate(m.STATE_LOADS_FAILED)), "failed"),
                Target(total(Q.now(m.STATE_LOADING)), "under way"),
            ),
            unit="ops",
        ),
        Panel(
            "Time of a load",
            "Mean, from the request's arrival in the engine to its state on the device.",
            (
                Target(
                    per(total(Q.rate(m.STATE_LOAD_SECONDS)), total(Q.rate(m.STATE_LOADS))), "mean"
                ),
            ),
            unit="s",
            may_be_empty=NOTHING_LOADED,
        ),
        Panel(
            "Items",
            "Pages, snapshots and sessions in host memory and in each engine's folder; on the "
            "device the pages that only the cache keeps, and of these the ones lent to snapshots.",
            (
                Target(total(Q.now(m.PREFIX_CACHE_PAGES)), "device pages"),
                Target(total(Q.now(m.PREFIX_CACHE_LENT)), "device pages, lent"),
                Target(total(Q.now(m.TIER_ITEMS, tier="=host")), "host"),
                Target(total(Q.now(m.TIER_PINNED, tier="=host")), "host pinned"),
                _by_engine(m.TIER_ITEMS, words="disk"),
                _by_engine(m.TIER_PINNED, words="disk pinned"),
            ),
            may_be_empty=NO_DISK,
        ),
        Panel(
            "Bytes on disk",
            "Of each engine's folder, which the replicas of a node share.",
            (
                _by_engine(m.TIER_USED_BYTES, "kind"),
                _by_engine(m.TIER_CAPACITY_BYTES, words="room"),
            ),
            unit="bytes",
            may_be_empty=NO_DISK,
        ),
        Panel(
            "Packing",
            "Bytes without packing over bytes with it.",
            (
                Target(
                    per(
                        total(Q.now(m.TIER_RAW_BYTES), "tier"),
                        total(Q.now(m.TIER_USED_BYTES), "tier"),
                    ),
                    "{{tier}}",
                ),
            ),
            may_be_empty="nothing has left the device",
        ),
        Panel(
            "Tier traffic",
            "Bytes read and written, packed.",
            (_by_tier(m.TIER_MOVED_BYTES, "op"),),
            unit="Bps",
        ),
        Panel(
            "Speed of a tier",
            "Bytes per second spent on reading and on writing.",
            tuple(
                Target(
                    per(_rate_of(m.TIER_MOVED_BYTES, op), _rate_of(m.TIER_BUSY_SECONDS, op)),
                    f"{{{{tier}}}} {op}",
                )
                for op in ("read", "write")
            ),
            unit="Bps",
            may_be_empty=NOTHING_LOADED,
        ),
        Panel(
            "Time in tiers",
            "Seconds per second on reading, writing and checking what was read.",
            (_by_tier(m.TIER_BUSY_SECONDS, "op"),),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Items moved and asked for",
            "Operations of each tier, and whether what was asked for was there.",
            (_by_tier(m.TIER_OPERATIONS, "op"), _by_tier(m.TIER_LOOKUPS, "outcome")),
            unit="ops",
        ),
        Panel(
            "Evicted and refused",
            "Items that made room, and items there was no room or no time for.",
            (
                _by_tier(m.TIER_EVICTIONS, words="evicted"),
                _by_tier(m.TIER_REFUSED, words="refused"),
                Target(total(Q.now(m.TIER_QUEUED), "tier"), "{{tier}} queued"),
            ),
            unit="ops",
        ),
        Panel(
            "Failures below the device",
            "Items that could not be had or stored. Each is computed again; none is an error of a "
            "request.",
            (_by_tier(m.TIER_FAILED, "reason"),),
            unit="ops",
        ),
        Panel(
            "Closed tiers, dead and stuck threads",
            "1: the tier takes nothing more. Threads that an error has ended must be 0; those that "
            "hang wait for a device that does not answer.",
            (
                Target(over("max", Q.select(m.TIER_READ_ONLY), "tier"), "{{tier}} read-only"),
                Target(total(Q.now(m.STATE_THREADS_DEAD)), "dead threads"),
                Target(total(Q.now(m.STATE_THREADS_STUCK)), "stuck threads"),
            ),
        ),
        Panel(
            "Sessions and checkpoints",
            "Sessions that engines know, requests whose session's state was gone, and states of "
            "running answers saved per second.",
            (
                Target(total(Q.now(m.STATE_SESSIONS)), "sessions"),
                Target(total(Q.rate(m.STATE_SESSIONS_LOST)), "lost/s"),
                Target(total(Q.rate(m.STATE_CHECKPOINTS)), "checkpoints/s"),
            ),
        ),
        Panel(
            "Old pages of kv_mode select",
            "Read exactly, and taken as an estimate, over steps and layers.",
            (Target(total(Q.rate(m.KV_PAGES_READ), "how"), "{{how}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Host memory of requests",
            "Old pages of running ones in kv_mode offload and select, and how much they may fill: "
            "those who find none left wait in the queue. What queued ones have loaded.",
            (
                Target(total(Q.now(m.STATE_LOADING_BYTES), "engine"), "{{engine}} queued"),
                Target(total(Q.now(m.STATE_OFFLOADED_BYTES), "engine"), "{{engine}}"),
                Target(total(Q.now(m.STATE_OFFLOAD_CAPACITY), "engine"), "{{engine}} room"),
            ),
            unit="bytes",
        ),
        Panel(
            "Old pages on disk",
            "Of running requests that host memory has no room for; what is read and written; and "
            "failures, after which a request begins again.",
            (
                Target(total(Q.now(m.STATE_SPILLED_BYTES), "engine"), "{{engine}}"),
                Target(total(Q.now(m.STATE_SPILL_CAPACITY), "engine"), "{{engine}} room"),
                Target(total(Q.rate(m.STATE_SPILL_MOVED), "op"), "{{op}}/s"),
                Target(total(Q.increase(m.STATE_SPILL_FAILED), "reason"), "{{reason}}"),
            ),
            unit="bytes",
        ),
    ),
)
