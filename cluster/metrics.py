"""Names, types and help of every exported metric: dashboards, rules and exporters read them here.

`expertmesh_{name}_{unit}`; seconds and bytes; `_total` for counters only (the client library adds
it); vLLM's suffixes where it has the same thing, so that dashboards port by replacing a prefix.
Ratios of counters are computed in queries, never exported. Labels hold bounded values only: a
place ("expert-0"), never a process, a client or a request.
"""

from dataclasses import dataclass
from typing import Literal

from expertmesh.actors.attention import timings
from expertmesh.cluster.ledger.stats import ALARM_KINDS, MESH_STATES

PREFIX = "expertmesh_"

# vLLM's buckets.
TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN_BUCKETS = timings.TOKEN_BUCKETS
REQUEST_BUCKETS = timings.REQUEST_BUCKETS
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
    prefix: str = PREFIX

    @property
    def full_name(self) -> str:
        """As the client library wants it; a counter is exposed with `_total` appended."""
        return self.prefix + self.name

    @property
    def exposed(self) -> tuple[str, ...]:
        """Names of its samples, as queries use them."""
        if self.kind == "histogram":
            return tuple(f"{self.full_name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.full_name + ("_total" if self.kind == "counter" else ""),)


FINISH_REASONS = ("stop", "length", "tool_calls")
# rate_limit: beyond the key's own limits; overload: beyond what the server can take.
ERROR_TYPES = (
    "validation", "not_found", "rate_limit", "overload", "cancelled", "unavailable", "timeout",
    "internal",
)  # fmt: skip
# Those that are not the client's doing.
SERVER_ERRORS = ("overload", "unavailable", "timeout", "internal")
ADMISSION_REASONS = ("queue_full", "rate_limit", "draining", "timeout")
AUTH_REASONS = ("missing", "unknown", "expired")
STEP_PHASES = ("plan", "forward", "sample", "publish")
PLACEMENT_REASONS = ("session", "prefix", "spread", "load")
# Below the device; those that a server has.
LOWER_TIERS = ("host", "disk")
TIER_FAILURES = (
    "missing", "corrupt", "timeout", "io", "full", "busy", "torn", "vanished", "sealed",
)  # fmt: skip
SPILL_FAILURES = ("corrupt", "timeout", "io", "full", "error", "busy")

# The front door. Counted where usage is counted, so that sums over answers equal the counters.
REQUEST_SUCCESS = Metric(
    "request_success", "counter",
    f"Choices that ended well, by finish_reason: {', '.join(FINISH_REASONS)}.",
    ("model_name", "finished_reason"),
)  # fmt: skip
REQUEST_FAILURES = Metric(
    "request_failures", "counter", f"Requests that ended badly: {', '.join(ERROR_TYPES)}.",
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
    "time_to_first_token_seconds", "histogram",
    "From a streaming request's arrival to its first token.", buckets=TIME_TO_FIRST_TOKEN_BUCKETS,
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
READY = Metric(
    "ready", "gauge", "1 when a request sent to this front door now would be served, else 0."
)
BUILD_INFO = Metric(
    "build_info", "gauge", "1, with the version of the server.", ("model_name", "version")
)
ADMISSION_QUEUED = Metric(
    "admission_queued_requests", "gauge", "Requests that wait in this front door for their turn."
)
ADMISSION_WAIT = Metric(
    "admission_wait_seconds", "histogram", "How long requests have waited for their turn.",
    buckets=REQUEST_BUCKETS,
)  # fmt: skip
ADMISSION_REFUSALS = Metric(
    "admission_refusals", "counter",
    f"Requests that were not let in: {', '.join(ADMISSION_REASONS)}.", ("model_name", "reason"),
)  # fmt: skip
AUTH_FAILURES = Metric(
    "auth_failures", "counter",
    f"Calls that came without a valid key: {', '.join(AUTH_REASONS)}.", ("model_name", "reason"),
)  # fmt: skip
AUTH_KEYS = Metric("auth_keys", "gauge", "Keys that open this front door now.")
AUTH_KEYS_FILE_FAILED = Metric(
    "auth_keys_file_failed", "gauge",
    "1 when the keys file could not be read last time (the keys read before stay valid), else 0.",
)  # fmt: skip
GRPC_REQUESTS = Metric(
    "grpc_requests", "counter", "Calls of the engine protocol that have ended, by status code.",
    ("model_name", "method", "code"),
)  # fmt: skip

PLACEMENTS = Metric(
    "router_placements", "counter",
    "Requests given to a replica, by why that one: session or prefix, for what it has cached of "
    "them; spread, as those that have something cached have too much to do; load, as nobody has.",
    ("model_name", "reason"),
)  # fmt: skip

# Engines (attention replicas). `engine` is the replica's seat ("attention-0").
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
    f"Seconds of the engine loop by phase: {', '.join(STEP_PHASES)}.", (*_ENGINE, "phase"),
)  # fmt: skip
CACHE_CONFIG_INFO = Metric(
    "cache_config_info", "gauge",
    "1, with tokens per page and number of pages (vLLM's names: blocks) of the hot tier.",
    (*_ENGINE, "block_size", "num_gpu_blocks"),
)  # fmt: skip
_TIER = (*_ENGINE, "tier", "kind")
TIER_USED_BYTES = Metric(
    "state_tier_used_bytes", "gauge",
    "Bytes of state in use by tier (hot: on the device; host; disk: of the whole folder, which "
    "the replicas of a node share) and kind: pages of MLA latents, slots with the KDA state of "
    "running sequences, snapshots of it, sessions.", _TIER,
)  # fmt: skip
TIER_CAPACITY_BYTES = Metric(
    "state_tier_capacity_bytes", "gauge",
    "Bytes of state a tier has room for, by kind; all: any of them.", _TIER,
)  # fmt: skip
# Of sequences: a choice of a request in one engine. One that is resumed elsewhere is another.
REQUEST_QUEUE_TIME = Metric(
    "request_queue_time_seconds", "histogram",
    "From a sequence's arrival in the engine to its first slot.", _ENGINE, REQUEST_BUCKETS,
)  # fmt: skip
REQUEST_PREFILL_TIME = Metric(
    "request_prefill_time_seconds", "histogram",
    "From a sequence's first slot to its first token.", _ENGINE, REQUEST_BUCKETS,
)  # fmt: skip
REQUEST_DECODE_TIME = Metric(
    "request_decode_time_seconds", "histogram",
    "From a sequence's first token to its last, aborted ones included.", _ENGINE, REQUEST_BUCKETS,
)  # fmt: skip
REQUEST_INFERENCE_TIME = Metric(
    "request_inference_time_seconds", "histogram",
    "From a sequence's first slot to its last token, aborted ones included.", _ENGINE,
    REQUEST_BUCKETS,
)  # fmt: skip
TIME_PER_OUTPUT_TOKEN = Metric(
    "request_time_per_output_token_seconds", "histogram",
    "A sequence's decode time over its tokens after the first.", _ENGINE, INTER_TOKEN_BUCKETS,
)  # fmt: skip
ITERATION_TOKENS = Metric(
    "iteration_tokens", "histogram", "Tokens computed by a step, prompts and answers.", _ENGINE,
    tuple(map(float, timings.STEP_BUCKETS)),
)  # fmt: skip

# What is cached of prompts. A tier below the device is there where it has room.
PREFIX_CACHE_QUERIES = Metric(
    "prefix_cache_queries", "counter", "Tokens of prompts that were looked up.", _ENGINE
)
PREFIX_CACHE_HITS = Metric(
    "prefix_cache_hits", "counter", "Those of them that were not computed again.", _ENGINE
)
PREFIX_CACHE_CEILING = Metric(
    "prefix_cache_ceiling_perc", "gauge",
    "Share of the tokens looked up that a cache without limits would have known, by estimate, 0 to "
    "1.", _ENGINE,
)  # fmt: skip
PREFIX_CACHE_RECOMPUTED = Metric(
    "prefix_cache_recomputed_tokens", "counter",
    "Tokens computed again although their latents were cached: no snapshot of the KDA state was "
    "that far.", _ENGINE,
)  # fmt: skip
PREFIX_CACHE_PAGES = Metric(
    "prefix_cache_pages", "gauge",
    "Pages on the device that no sequence uses and the cache keeps; they are given up when needed.",
    _ENGINE,
)  # fmt: skip
PREFIX_CACHE_LENT = Metric(
    "prefix_cache_lent_pages", "gauge",
    "Those of them that hold snapshots which have no place of their own.", _ENGINE,
)  # fmt: skip
TIER_HIT_TOKENS = Metric(
    "state_tier_hit_tokens", "counter", "Tokens that were not computed again, by where they were.",
    (*_ENGINE, "tier"),
)  # fmt: skip
STATE_LOADS = Metric(
    "state_loads", "counter", "Prefixes that were to be brought to the device from below.", _ENGINE
)
STATE_LOADS_FAILED = Metric(
    "state_loads_failed", "counter", "Those of them that did not come, and were computed instead.",
    _ENGINE,
)  # fmt: skip
STATE_LOAD_SECONDS = Metric(
    "state_load_seconds", "counter", "Seconds that such loads took, those at the same time added.",
    _ENGINE,
)  # fmt: skip
STATE_LOADING = Metric(
    "state_loading", "gauge", "Prefixes that are on their way to the device.", _ENGINE
)
STATE_LOADING_BYTES = Metric(
    "state_loading_bytes", "gauge",
    "What queued requests hold, or wait for, of lower tiers, unpacked.", _ENGINE,
)  # fmt: skip
STATE_CHECKPOINTS = Metric(
    "state_checkpoints", "counter", "States of running answers that were saved.", _ENGINE
)
STATE_SESSIONS = Metric("state_sessions", "gauge", "Sessions that the engine knows.", _ENGINE)
STATE_SESSIONS_LOST = Metric(
    "state_sessions_lost", "counter",
    "Requests that computed their session again: its state was gone when they were to begin.",
    _ENGINE,
)  # fmt: skip
KV_PAGES_READ = Metric(
    "kv_pages_read", "counter",
    "Old pages, over steps and layers, that requests of kv_mode select read: exact, or taken as an "
    "estimate.", (*_ENGINE, "how"),
)  # fmt: skip
STATE_OFFLOADED_BYTES = Metric(
    "state_offloaded_bytes", "gauge",
    "Host memory with pages that running requests of kv_mode offload and select have off the "
    "device; no part of the tiers.", _ENGINE,
)  # fmt: skip
STATE_OFFLOAD_CAPACITY = Metric(
    "state_offload_capacity_bytes", "gauge",
    "How much of it there may be; who finds none left waits in the queue.", _ENGINE,
)  # fmt: skip
STATE_SPILLED_BYTES = Metric(
    "state_offload_disk_bytes", "gauge",
    "Disk with the oldest of those pages, of requests that host memory has no room for.", _ENGINE,
)  # fmt: skip
STATE_SPILL_CAPACITY = Metric(
    "state_offload_disk_capacity_bytes", "gauge", "How much of it there may be.", _ENGINE
)
STATE_SPILL_MOVED = Metric(
    "state_offload_disk_moved_bytes", "counter", "Bytes read from and written to it.",
    (*_ENGINE, "op"),
)  # fmt: skip
STATE_SPILL_FAILED = Metric(
    "state_offload_disk_failures", "counter",
    f"Times that it lost old pages, or could not take them: {', '.join(SPILL_FAILURES)} (others "
    "have failed lately). Their requests begin again, to the same answers.",
    (*_ENGINE, "reason"),
)  # fmt: skip
STATE_THREADS_DEAD = Metric(
    "state_threads_dead", "gauge",
    "Background threads of the tiers that an error has ended. Must be 0.", _ENGINE,
)  # fmt: skip
STATE_THREADS_STUCK = Metric(
    "state_threads_stuck", "gauge",
    "Those of them that hang: a step that should take seconds has been running for half a minute.",
    _ENGINE,
)  # fmt: skip
_LOWER = (*_ENGINE, "tier")
TIER_ITEMS = Metric("state_tier_items", "gauge", "Pages, snapshots and sessions in a tier.", _LOWER)
TIER_PINNED = Metric(
    "state_tier_pinned_items", "gauge", "Those of them that nothing evicts.", _LOWER
)
TIER_RAW_BYTES = Metric(
    "state_tier_raw_bytes", "gauge", "What they would take without being packed.", _LOWER
)
TIER_LOOKUPS = Metric(
    "state_tier_lookups", "counter", "Items asked of a tier: hit, miss.", (*_LOWER, "outcome")
)
TIER_OPERATIONS = Metric(
    "state_tier_operations", "counter", "Items read from and written to a tier.", (*_LOWER, "op")
)
TIER_MOVED_BYTES = Metric(
    "state_tier_moved_bytes", "counter", "Bytes read from and written to a tier, packed.",
    (*_LOWER, "op"),
)  # fmt: skip
TIER_BUSY_SECONDS = Metric(
    "state_tier_busy_seconds", "counter",
    "Seconds that a tier spent on read and write, and on verify: checking what was read.",
    (*_LOWER, "op"),
)  # fmt: skip
TIER_EVICTIONS = Metric(
    "state_tier_evictions", "counter", "Items that had to make room, the device's among them.",
    _LOWER,
)  # fmt: skip
TIER_REFUSED = Metric(
    "state_tier_refused", "counter", "Items that a tier had no room or no time for.", _LOWER
)
TIER_QUEUED = Metric("state_tier_queued", "gauge", "Items that wait for a tier.", _LOWER)
TIER_FAILED = Metric(
    "state_tier_failures", "counter",
    f"Items that could not be had or stored: {', '.join(TIER_FAILURES)} (torn: the log's end after "
    "a crash; vanished: evicted by another replica meanwhile; sealed: with another secret, or with "
    "none). Each is computed again; corrupt ones are never used.", (*_LOWER, "reason"),
)  # fmt: skip
TIER_READ_ONLY = Metric(
    "state_tier_read_only", "gauge", "1 while a tier takes nothing more, else 0.", _LOWER
)

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
EXPERT_WEIGHT_BYTES = Metric(
    "expert_weight_bytes", "gauge", "Bytes of the experts an actor holds, as in the checkpoint.",
    _SEAT,
)  # fmt: skip
EXPERT_CACHE_BYTES = Metric(
    "expert_decoded_cache_bytes", "gauge",
    "Bytes of experts that an actor keeps decoded beside them.", _SEAT,
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
    f"Alarms of the collapse detector: {', '.join(ALARM_KINDS)}.", ("model_name", "kind"),
)  # fmt: skip
ROUTING_ALARMS_ACTIVE = Metric(
    "routing_alarms_active", "gauge",
    "Alarms that hold now: experts for dead_expert, layers for the other kinds.",
    ("model_name", "kind"),
)  # fmt: skip
MESH_STATE = Metric(
    "mesh_state", "gauge", f"1 for the mesh's state, 0 for the others: {', '.join(MESH_STATES)}.",
    ("model_name", "state"),
)  # fmt: skip
MESH_MEMBERS = Metric(
    "mesh_members", "gauge", "Workers that are there, by kind: attention, expert.",
    ("model_name", "kind"),
)  # fmt: skip
MESH_DESIRED = Metric(
    "mesh_desired_members", "gauge", "Workers that there should be, by kind.",
    ("model_name", "kind"),
)  # fmt: skip
MESH_EPOCH = Metric("mesh_epoch", "gauge", "Number of the running epoch of the mesh.")
ROUTING_VERSION = Metric(
    "mesh_routing_version", "gauge", "Version of the placement that steps use."
)
FAILOVERS = Metric("mesh_failovers", "counter", "Epochs that began because an actor was lost.")
LOSSES = Metric("mesh_losses", "counter", "Workers that were lost: died, fell silent or stuck.")
JOINS = Metric("mesh_joins", "counter", "Workers that have joined the running mesh.")
FAILED_JOINS = Metric("mesh_failed_joins", "counter", "Workers that did not come up.")
LAST_RECOVERY = Metric(
    "mesh_last_recovery_seconds", "gauge",
    "From the last loss to the epoch that served again. Absent before the first.",
)  # fmt: skip
REBALANCE_RUNNING = Metric("mesh_rebalance_running", "gauge", "1 while experts are moved, else 0.")
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

# Of the front door's process, as the client library names and describes them.
PROCESS_CPU = Metric("process_cpu_seconds", "counter", "CPU seconds.", (), prefix="")
PROCESS_MEMORY = Metric("process_resident_memory_bytes", "gauge", "Resident bytes.", (), prefix="")
PROCESS_FILES = Metric("process_open_fds", "gauge", "Open file descriptors.", (), prefix="")
PROCESS_START = Metric("process_start_time_seconds", "gauge", "Unix time.", (), prefix="")

_DEFINED = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
ALL = tuple(metric for metric in _DEFINED if metric.prefix)
PROCESS = tuple(metric for metric in _DEFINED if not metric.prefix)
# Exposed by every front door with the same value: they are the engines' and the mesh's.
SHARED = ALL[ALL.index(NUM_REQUESTS_RUNNING) :]
# Exposed by a server that has a mesh.
MESH = ALL[ALL.index(EXPERT_UP) :]
# Exposed where there is something to count: keys are asked for, gRPC has a port, replicas exist.
OPTIONAL = (AUTH_FAILURES, AUTH_KEYS, AUTH_KEYS_FILE_FAILED, GRPC_REQUESTS, PLACEMENTS)
