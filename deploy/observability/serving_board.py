"""The dashboard a pager opens first: is it serving, how fast, how loaded, how full."""

from expertmesh.cluster import metrics as m
from expertmesh.deploy.observability.panels import Board, Panel, Row, Target, Variable
from expertmesh.deploy.observability.promql import Query, over, per, total
from expertmesh.deploy.observability.slo import FIRST_TOKEN_SLO, INTER_TOKEN_SLO, Objective
from expertmesh.deploy.observability.state_row import CACHED

Q = Query("$__rate_interval", variables=True)
NO_GRPC = "only a server with a gRPC port has it"

MODEL = Variable("model_name", "Model", f"label_values({m.BUILD_INFO.full_name}, model_name)")
ENGINE = Variable(
    "engine",
    "Engine",
    f'label_values({m.ENGINE_UP.full_name}{{model_name=~"$model_name"}}, engine)',
)


def quantiles(metric: m.Metric, *levels: float) -> tuple[Target, ...]:
    return tuple(Target(Q.quantile(level, metric), f"p{100 * level:g}") for level in levels)


def _within(objective: Objective) -> str:
    fast = total(Q.rate(objective.metric, "bucket", le=f"={objective.bound:g}"))
    return per(fast, total(Q.rate(objective.metric, "count")))


def _slo_stat(title: str, objective: Objective) -> Panel:
    return Panel(
        title,
        f"Share within {objective.bound:g} s; the objective is {objective.share:.0%}.",
        (Target(_within(objective)),),
        unit="percentunit",
        view="stat",
        width=6,
        thresholds=((0, "red"), (objective.share - 0.04, "orange"), (objective.share, "green")),
    )


_ENDED = [total(Q.rate(metric)) for metric in (m.REQUEST_SUCCESS, m.REQUEST_FAILURES)]
_SERVER_ERRORS = "=~" + "|".join(m.SERVER_ERRORS)

SLO = Row(
    "Is it serving?",
    (
        Panel(
            "Front doors ready",
            "The least of all front doors: 0 as long as one of them would refuse a request.",
            (Target(over("min", Q.select(m.READY))),),
            view="stat",
            unit="bool",
            width=6,
            thresholds=((0, "red"), (1, "green")),
        ),
        _slo_stat("First tokens in time", FIRST_TOKEN_SLO),
        _slo_stat("Tokens in time", INTER_TOKEN_SLO),
        Panel(
            "Server errors",
            "Requests that ended badly and not by the client's doing, of all that ended.",
            (
                Target(
                    per(
                        total(Q.rate(m.REQUEST_FAILURES, error_type=_SERVER_ERRORS)),
                        f"({_ENDED[0]} + {_ENDED[1]})",
                    )
                ),
            ),
            unit="percentunit",
            view="stat",
            width=6,
            thresholds=((0, "green"), (0.01, "orange"), (0.05, "red")),
        ),
        Panel(
            "Time to first token",
            "Of streams, from the request's arrival.",
            quantiles(m.TIME_TO_FIRST_TOKEN, 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Time between tokens",
            "Of streams, as the front door sends them.",
            quantiles(m.INTER_TOKEN_LATENCY, 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Whole requests",
            "From arrival to the last byte.",
            quantiles(m.E2E_LATENCY, 0.5, 0.95, 0.99),
            unit="s",
        ),
        Panel(
            "Answers",
            "Choices that ended well, by the reason they ended.",
            (Target(total(Q.rate(m.REQUEST_SUCCESS), "finished_reason"), "{{finished_reason}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Failures",
            "Requests that ended badly; cancelled: the client went away.",
            (Target(total(Q.rate(m.REQUEST_FAILURES), "error_type"), "{{error_type}}"),),
            unit="reqps",
            stacked=True,
        ),
        Panel(
            "Refused at the door",
            "Calls without a valid key, and requests beyond what may run and wait.",
            (
                Target(total(Q.rate(m.AUTH_FAILURES), "reason"), "key {{reason}}"),
                Target(total(Q.rate(m.ADMISSION_REFUSALS), "reason"), "{{reason}}"),
            ),
            unit="reqps",
        ),
    ),
)

LOAD = Row(
    "Load",
    (
        Panel(
            "Tokens per second",
            "Generated and read, as the engines compute them.",
            (
                Target(total(Q.rate(m.ENGINE_GENERATION_TOKENS)), "generated"),
                Target(total(Q.rate(m.ENGINE_PROMPT_TOKENS)), "prompt"),
            ),
            unit="suffix: tok/s",
        ),
        Panel(
            "Sequences",
            "In the batch of each engine, and waiting for a slot or pages.",
            (
                Target(total(Q.now(m.NUM_REQUESTS_RUNNING), "engine"), "running {{engine}}"),
                Target(total(Q.now(m.NUM_REQUESTS_WAITING), "engine"), "waiting {{engine}}"),
            ),
        ),
        Panel(
            "Requests in the front doors",
            "Generation requests that are being answered.",
            (Target(total(Q.now(m.HTTP_REQUESTS_IN_FLIGHT)), "in flight"),),
        ),
        Panel(
            "Waiting for a turn",
            "Requests in the front doors' fair queue, and how long those that left it had waited.",
            (
                Target(total(Q.now(m.ADMISSION_QUEUED)), "queued"),
                Target(Q.quantile(0.95, m.ADMISSION_WAIT), "p95 wait (s)"),
            ),
        ),
        Panel(
            "Queue time",
            "Of sequences: arrival in the engine to their first slot.",
            quantiles(m.REQUEST_QUEUE_TIME, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            "Prefill time",
            "Of sequences: first slot to first token.",
            quantiles(m.REQUEST_PREFILL_TIME, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            "Decode and inference time",
            "Of sequences: first to last token, and first slot to last token.",
            (
                Target(Q.quantile(0.95, m.REQUEST_DECODE_TIME), "decode p95"),
                Target(Q.quantile(0.95, m.REQUEST_INFERENCE_TIME), "inference p95"),
            ),
            unit="s",
        ),
        Panel(
            "Time per output token",
            "Of whole sequences, as the engine sees it.",
            quantiles(m.TIME_PER_OUTPUT_TOKEN, 0.5, 0.95),
            unit="s",
        ),
        Panel(
            "Tokens per step",
            "How full a step of an engine is.",
            (
                Target(Q.mean(m.ITERATION_TOKENS, "engine"), "mean {{engine}}"),
                Target(Q.quantile(0.95, m.ITERATION_TOKENS, "engine"), "p95 {{engine}}"),
            ),
        ),
        Panel(
            "Where an engine's time goes",
            "Seconds per second of each phase, all engines.",
            (Target(total(Q.rate(m.ENGINE_STEP_SECONDS), "phase"), "{{phase}}"),),
            unit="s",
            stacked=True,
        ),
        Panel(
            "Steps per second",
            "Of each engine; all engines of a mesh step together.",
            (Target(total(Q.rate(m.ENGINE_STEPS), "engine"), "{{engine}}"),),
            unit="ops",
        ),
        Panel(
            "Request sizes",
            "Tokens per request.",
            (
                Target(Q.quantile(0.5, m.REQUEST_PROMPT_TOKENS), "prompt p50"),
                Target(Q.quantile(0.95, m.REQUEST_PROMPT_TOKENS), "prompt p95"),
                Target(Q.quantile(0.5, m.REQUEST_GENERATION_TOKENS), "answer p50"),
                Target(Q.quantile(0.95, m.REQUEST_GENERATION_TOKENS), "answer p95"),
            ),
        ),
        Panel(
            "Usage",
            "Tokens of finished requests as their usage says: what clients count.",
            (
                Target(total(Q.rate(m.GENERATION_TOKENS)), "completion"),
                Target(total(Q.rate(m.PROMPT_TOKENS)), "prompt"),
            ),
            unit="suffix: tok/s",
        ),
        Panel(
            "gRPC calls",
            "Of the engine protocol, by status code.",
            (Target(total(Q.rate(m.GRPC_REQUESTS), "method", "code"), "{{method}} {{code}}"),),
            unit="reqps",
            may_be_empty=NO_GRPC,
        ),
        Panel(
            "Engines up",
            "1: takes requests.",
            (Target(over("min", Q.select(m.ENGINE_UP), "engine"), "{{engine}}"),),
            unit="bool",
            maximum=1,
        ),
    ),
)

STATE = Row(
    "State (KV)",
    (
        Panel(
            "Pages in use",
            "Share of the 64-token pages of MLA latents.",
            (Target(over("max", Q.select(m.KV_CACHE_USAGE), "engine"), "{{engine}}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Slots in use",
            "Share of the KDA state slots: one per running sequence.",
            (Target(over("max", Q.select(m.STATE_SLOT_USAGE), "engine"), "{{engine}}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Bytes in use",
            "In memory, by tier and kind, all engines.",
            (
                Target(
                    total(Q.now(m.TIER_USED_BYTES, tier="!=disk"), "tier", "kind"),
                    "{{tier}} {{kind}}",
                ),
                Target(total(Q.now(m.TIER_CAPACITY_BYTES, tier="!=disk"), "tier"), "{{tier}} room"),
            ),
            unit="bytes",
        ),
        Panel(
            "Preemptions",
            "Sequences put back to be computed again; steady ones mean too few pages.",
            (Target(total(Q.rate(m.NUM_PREEMPTIONS), "engine"), "{{engine}}"),),
            unit="ops",
        ),
        Panel(
            "Recomputed tokens",
            "Rows computed again after a preemption or on another replica.",
            (Target(total(Q.rate(m.ENGINE_RECOMPUTED_TOKENS), "engine"), "{{engine}}"),),
            unit="suffix: tok/s",
        ),
        Panel(
            "Cache geometry",
            "Tokens per page and pages of each engine.",
            (Target(Q.now(m.CACHE_CONFIG_INFO), "{{engine}}"),),
            view="table",
        ),
    ),
)

# Keeps the processes of the chosen models: the library's own metrics do not carry the label.
_DOORS = f"* on (job, instance) group_left () {Q.select(m.BUILD_INFO)}"
DOOR = Row(
    "Front door",
    (
        Panel(
            "CPU",
            "Cores in use by the front doors' processes.",
            (Target(f"{Q.rate(m.PROCESS_CPU)} {_DOORS}", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Memory",
            "Resident bytes of the front doors' processes.",
            (Target(f"{m.PROCESS_MEMORY.full_name} {_DOORS}", "{{instance}}"),),
            unit="bytes",
            width=6,
        ),
        Panel(
            "Open files",
            "Sockets among them: each open stream has one.",
            (Target(f"{m.PROCESS_FILES.full_name} {_DOORS}", "{{instance}}"),),
            width=6,
        ),
        Panel(
            "Version and age",
            "When each front door started.",
            (
                Target(
                    f"1000 * {m.PROCESS_START.full_name} * on (job, instance) group_left (version) "
                    + Q.select(m.BUILD_INFO),
                    "{{version}}",
                ),
            ),
            unit="dateTimeFromNow",
            view="stat",
            width=6,
        ),
    ),
)

BOARD = Board(
    uid="expertmesh-serving",
    title="ExpertMesh / Serving",
    description="Service level, load and state of an ExpertMesh server.",
    rows=(SLO, LOAD, STATE, CACHED, DOOR),
    variables=(MODEL, ENGINE),
    marks=(("New epoch", f"changes({Q.select(m.MESH_EPOCH)}[$__rate_interval]) > 0"),),
)
