"""Names, types and help of every exported metric: dashboards, rules and exporters read them here.

`expertmesh_{name}_{unit}`; seconds and bytes; `_total` for counters only (the client library adds
it); vLLM's suffixes where it has the same thing, so that dashboards port by replacing a prefix.
Ratios of counters are computed in queries, never exported. Labels hold bounded values only.
"""

from dataclasses import dataclass
from typing import Literal

PREFIX = "expertmesh_"

# vLLM's buckets; inter-token ones start lower, as its first (10 ms) is blind for fast decoding.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5,
    10, 20, 40, 80,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240,
    480, 960, 1920, 7680,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without prefix and without `_total`. labels: every sample carries exactly these."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ("model_name",)
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As the client library wants it; a counter is exposed with `_total` appended."""
        return PREFIX + self.name


# The HTTP edge. Counted where usage is counted, so that sums over answers equal the counters.
REQUEST_SUCCESS = Metric(
    "request_success", "counter", "Choices that ended well, by finish_reason.",
    ("model_name", "finished_reason"),
)  # fmt: skip
REQUEST_FAILURES = Metric(
    "request_failures", "counter",
    "Requests that ended badly: validation, not_found, overload, cancelled, unavailable, timeout, "
    "internal.",
    ("model_name", "error_type"),
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "prompt_tokens", "counter",
    "Prompt tokens of finished requests, as in usage.prompt_tokens: a prompt counts once for all "
    "its n choices.",
)  # fmt: skip
GENERATION_TOKENS = Metric(
    "generation_tokens", "counter",
    "Generated tokens of finished requests, as in usage.completion_tokens.",
)  # fmt: skip
TIME_TO_FIRST_TOKEN = Metric(
    "time_to_first_token_seconds", "histogram", "From the request's arrival to its first token.",
    buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
)  # fmt: skip
INTER_TOKEN_LATENCY = Metric(
    "inter_token_latency_seconds", "histogram",
    "Time between chunks of a stream, per token in the chunk.", buckets=INTER_TOKEN_BUCKETS,
)  # fmt: skip
E2E_LATENCY = Metric(
    "e2e_request_latency_seconds", "histogram", "From the request's arrival to its end.",
    buckets=REQUEST_BUCKETS,
)  # fmt: skip
REQUEST_PROMPT_TOKENS = Metric(
    "request_prompt_tokens", "histogram", "Prompt tokens per request.", buckets=TOKEN_BUCKETS
)
REQUEST_GENERATION_TOKENS = Metric(
    "request_generation_tokens", "histogram", "Generated tokens per request, all choices.",
    buckets=TOKEN_BUCKETS,
)  # fmt: skip
HTTP_REQUESTS_IN_FLIGHT = Metric(
    "http_requests_in_flight", "gauge", "Generation requests inside this front door."
)

# Engines (attention replicas). `engine` is the replica's rank.
_ENGINE = ("model_name", "engine")
NUM_REQUESTS_RUNNING = Metric(
    "num_requests_running", "gauge", "Sequences in the running batch.", _ENGINE
)
NUM_REQUESTS_WAITING = Metric(
    "num_requests_waiting", "gauge", "Sequences that wait for a slot or pages.", _ENGINE
)
KV_CACHE_USAGE = Metric(
    "kv_cache_usage_perc", "gauge", "Share of the 64-token pages in use, 0 to 1.", _ENGINE
)
STATE_SLOT_USAGE = Metric(
    "state_slot_usage_perc", "gauge", "Share of the KDA state slots in use, 0 to 1.", _ENGINE
)
ENGINE_UP = Metric("engine_up", "gauge", "1 when the engine can take requests, else 0.", _ENGINE)
NUM_PREEMPTIONS = Metric(
    "num_preemptions", "counter", "Sequences put back to recompute later.", _ENGINE
)
ENGINE_STEPS = Metric("engine_steps", "counter", "Steps of the engine loop.", _ENGINE)
ENGINE_PROMPT_TOKENS = Metric(
    "engine_prompt_tokens", "counter",
    "Prompt tokens computed, each sequence once (n choices of a prompt are n sequences).", _ENGINE,
)  # fmt: skip
ENGINE_GENERATION_TOKENS = Metric(
    "engine_generation_tokens", "counter",
    "Tokens handed out by the engine, those past a stop string included.", _ENGINE,
)  # fmt: skip
ENGINE_RECOMPUTED_TOKENS = Metric(
    "engine_recomputed_tokens", "counter", "Rows computed again after a preemption.", _ENGINE
)
ENGINE_STEP_SECONDS = Metric(
    "engine_step_seconds", "counter",
    "Seconds of the engine loop by phase: plan, forward, sample, publish.", (*_ENGINE, "phase"),
)  # fmt: skip

# The mesh. `seat` is a place in it ("expert-0"), whoever sits there: as many series as seats.
# Nothing is per layer or per expert; `expertmesh routing report` shows those.
_SEAT = ("model_name", "seat")
EXPERT_UP = Metric(
    "expert_up", "gauge", "1 when the expert actor in this seat answers and serves, else 0.", _SEAT
)
EXPERT_ROWS = Metric(
    "expert_rows", "counter",
    "Rows an expert actor has computed, one per (token, MoE layer).", _SEAT,
)  # fmt: skip
EXPERT_BUSY_SECONDS = Metric(
    "expert_busy_seconds", "counter", "Seconds an expert actor has spent in its experts.", _SEAT
)
DISPATCHED_ROWS = Metric(
    "moe_dispatched_rows", "counter",
    "Rows an attention replica has sent, one per (token, MoE layer, expert actor). Over "
    "moe_routed_rows: distinct expert actors per token.", _SEAT,
)  # fmt: skip
ROUTED_ROWS = Metric(
    "moe_routed_rows", "counter",
    "Rows an attention replica has routed, one per (token, MoE layer); rows that carry a token "
    "only.", _SEAT,
)  # fmt: skip
DISPATCH_SECONDS = Metric(
    "moe_dispatch_seconds", "counter", "Seconds an attention replica has spent sending rows.", _SEAT
)
COMBINE_SECONDS = Metric(
    "moe_combine_seconds", "counter",
    "Seconds an attention replica has spent waiting for and adding up partial sums.", _SEAT,
)  # fmt: skip
LOAD_BALANCEDNESS = Metric(
    "expert_load_balancedness", "gauge",
    "Mean over largest load of the expert actors in a layer, 0 to 1, 1 is even; of the worst "
    "layer and the mean over layers. Absent without load.", ("model_name", "layers"),
)  # fmt: skip
ROUTING_ENTROPY = Metric(
    "routing_entropy_min", "gauge",
    "Entropy of the experts' shares over its maximum, 0 to 1, of the layer where it is least. "
    "Absent without load.",
)  # fmt: skip
DEAD_EXPERTS = Metric(
    "dead_experts", "gauge", "(layer, expert) pairs that get no hits though some are expected."
)
ROUTING_ALARMS = Metric(
    "routing_alarms", "counter",
    "Alarms of the collapse detector: dead_expert, entropy_drop, router_nonfinite, "
    "expert_nonfinite.", ("model_name", "kind"),
)  # fmt: skip
ROUTING_ALARMS_ACTIVE = Metric(
    "routing_alarms_active", "gauge",
    "Alarms that hold now: experts for dead_expert, layers for the other kinds.",
    ("model_name", "kind"),
)  # fmt: skip
MESH_EPOCH = Metric("mesh_epoch", "gauge", "Number of the running epoch of the mesh.")
ROUTING_VERSION = Metric(
    "mesh_routing_version", "gauge", "Version of the placement that steps use."
)
FAILOVERS = Metric("mesh_failovers", "counter", "Epochs that began because an actor was lost.")
REBALANCES = Metric(
    "mesh_rebalances", "counter", "Rebalances by outcome: done, failed.",
    ("model_name", "outcome"),
)  # fmt: skip
LAST_REBALANCE = Metric(
    "mesh_last_rebalance_timestamp_seconds", "gauge",
    "Unix time of the last rebalance that was done. Absent before the first.",
)  # fmt: skip
MOVED_EXPERTS = Metric("mesh_moved_experts", "counter", "Copies of experts moved by rebalances.")
MOVED_BYTES = Metric("mesh_moved_bytes", "counter", "Bytes of weights that rebalances moved.")
CHECKSUM_FAILURES = Metric(
    "mesh_checksum_failures", "counter", "Moved experts that were not what had been sent."
)
HELD_REQUESTS = Metric(
    "mesh_held_requests", "gauge", "Requests that wait for the mesh to serve again."
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
# Exposed by a server that has a mesh.
MESH = ALL[ALL.index(EXPERT_UP) :]
