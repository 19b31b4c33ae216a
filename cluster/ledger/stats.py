"""What the keeper of a mesh tells the front door's /metrics: one message, of bounded size.

Everything is by seat ("expert-0"), never by actor or host name, and nothing is per expert or per
layer, so the number of series depends on the size of the mesh alone.
"""

import msgspec

ALARM_KINDS = (
    "dead_expert", "entropy_drop", "router_nonfinite", "expert_nonfinite",
)  # fmt: skip
MESH_STATES = ("ready", "recovering", "unserviceable", "stopped")


class ActorLoad(msgspec.Struct, frozen=True):
    """An expert actor. rows: one per (token, MoE layer). up: it answers and serves; of one that
    does not, nothing else is known. weight_bytes: of the experts it holds, as in the checkpoint;
    cache_bytes: of those it keeps decoded beside them."""

    seat: str
    rows: int = 0
    busy_seconds: float = 0.0
    up: bool = True
    weight_bytes: int = 0
    cache_bytes: int = 0


class ReplicaLoad(msgspec.Struct, frozen=True):
    """An attention replica's end of the exchange, counters of its process.

    rows_sent: one per (token, MoE layer, expert actor). routed_rows: one per (token, MoE layer).
    """

    seat: str
    rows_sent: int = 0
    routed_rows: int = 0
    dispatch_seconds: float = 0.0
    combine_seconds: float = 0.0


class RoutingStats(msgspec.Struct, frozen=True):
    """The ledger's view of all layers. None: no load yet, so there is nothing to divide by.

    balancedness: mean over largest load of the ranks, 0 to 1, of the worst layer and the mean over
    layers. entropy_min: the least of the layers, 0 to 1. dead_experts: (layer, expert) pairs in
    alarm. alarms: by kind, since the ledger began. alarms_active: by kind, at this moment.
    """

    balancedness_worst: float | None = None
    balancedness_mean: float | None = None
    entropy_min: float | None = None
    dead_experts: int = 0
    alarms: dict[str, int] = {}
    alarms_active: dict[str, int] = {}


class MeshStats(msgspec.Struct, kw_only=True):
    """Counters since the keeper began, and gauges of this moment.

    state: one of MESH_STATES. members, desired: workers by kind, attention and expert.
    last_recovery: seconds from a loss to the next epoch; None before the first.
    rebalances: by outcome, done or failed; rebalancing: one is under way. last_rebalance: Unix time
    of the last that was done. held_requests: requests that wait for a replica or an epoch.
    """

    state: str = "ready"
    epoch: int = 0
    routing_version: int = 0
    members: dict[str, int] = {}
    desired: dict[str, int] = {}
    losses: int = 0
    joins: int = 0
    failed_joins: int = 0
    failovers: int = 0
    last_recovery: float | None = None
    rebalancing: bool = False
    rebalances: dict[str, int] = {}
    last_rebalance: float | None = None
    moved_experts: int = 0
    moved_bytes: int = 0
    checksum_failures: int = 0
    held_requests: int = 0
    actors: list[ActorLoad] = []
    replicas: list[ReplicaLoad] = []
    routing: RoutingStats = msgspec.field(default_factory=RoutingStats)
