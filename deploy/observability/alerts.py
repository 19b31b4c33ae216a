"""What somebody should be told, and the recorded ratios that the burn rates need."""

from expertmesh.cluster import metrics as m
from expertmesh.deploy.observability.promql import SERVER, Query, over, per, total
from expertmesh.deploy.observability.rules import Alert, Group, Record
from expertmesh.deploy.observability.slo import FIRST_TOKEN_SLO, INTER_TOKEN_SLO, Objective

BURN_WINDOWS = ("5m", "30m", "1h", "6h")
# (long window, short window, factor, severity): how fast the budget may burn. From the SRE
# workbook: 2 % of a month's budget in an hour, 5 % in six.
BURNS = (("1h", "5m", 14.4, "critical"), ("6h", "30m", 6.0, "warning"))
QUEUED = f"model_name:{m.PREFIX}queued_requests:sum"
QUEUE_CAME_TO = 10


def window(length: str) -> Query:
    return Query(length, variables=False)


Q = window("5m")


def _each(function: str, metric: m.Metric) -> str:
    """Of every engine or seat: what the front doors of its server say."""
    return over(function, Q.select(metric), *SERVER, *metric.labels)


def slow(objective: Objective, length: str) -> str:
    return f"model_name:{m.PREFIX}slow_{objective.name}:ratio_rate{length}"


def _records(objective: Objective) -> tuple[Record, ...]:
    """Share of observations that were too slow; NaN without traffic, which no alert matches."""
    found = []
    for length in BURN_WINDOWS:
        q = window(length)
        fast = total(q.rate(objective.metric, "bucket", le=f"={objective.bound:g}"), "model_name")
        everything = total(q.rate(objective.metric, "count"), "model_name")
        found.append(Record(slow(objective, length), f"1 - {per(fast, everything)}"))
    return tuple(found)


def _burns(objective: Objective, name: str, what: str) -> tuple[Alert, ...]:
    budget = 1 - objective.share
    return tuple(
        Alert(
            f"ExpertMesh{name}Burns{'Fast' if severity == 'critical' else ''}",
            f"{slow(objective, long)} > {factor * budget:.4g} "
            f"and {slow(objective, short)} > {factor * budget:.4g}",
            severity,  # type: ignore[arg-type]
            f"{what} of {{{{ $labels.model_name }}}} come too late",
            f"{{{{ $value | humanizePercentage }}}} took longer than {objective.bound:g} s over "
            f"{long} and {short}; the objective allows {budget:.0%}. See queue time, prefill time "
            "and load balance on the dashboards.",
            holds="2m" if severity == "critical" else "15m",
        )
        for long, short, factor, severity in BURNS
    )


_SERVER_ERRORS = total(
    Q.rate(m.REQUEST_FAILURES, error_type="=~" + "|".join(m.SERVER_ERRORS)), "model_name"
)
_ENDED = (
    f"({total(Q.rate(m.REQUEST_FAILURES), 'model_name')} + "
    f"{total(Q.rate(m.REQUEST_SUCCESS), 'model_name')})"
)

RECORDS = Group(
    "expertmesh-records",
    (
        *_records(FIRST_TOKEN_SLO),
        *_records(INTER_TOKEN_SLO),
        Record(f"model_name:{m.PREFIX}server_errors:ratio_rate5m", per(_SERVER_ERRORS, _ENDED)),
        Record(
            QUEUED,
            f"{total(Q.now(m.NUM_REQUESTS_WAITING), 'model_name')} "
            f"+ ({total(Q.select(m.ADMISSION_QUEUED), 'model_name')} "
            f"or 0 * {over('max', Q.select(m.BUILD_INFO), 'model_name')})",
        ),
    ),
)

SERVING = Group(
    "expertmesh-serving",
    (
        Alert(
            "ExpertMeshAbsent",
            f"absent({m.BUILD_INFO.full_name})",
            "critical",
            "No ExpertMesh server is scraped",
            "Prometheus has no front door among its targets: it is down, or the scrape "
            "configuration (port, key) is wrong.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshNotReady",
            f"{Q.select(m.READY)} == 0",
            "critical",
            "{{ $labels.instance }} does not serve {{ $labels.model_name }}",
            "Requests to this front door are answered 503. GET /ready says why.",
            holds="2m",
        ),
        Alert(
            "ExpertMeshReplicaDown",
            f"{_each('min', m.ENGINE_UP)} == 0",
            "critical",
            "Attention replica {{ $labels.engine }} of {{ $labels.model_name }} is down",
            "Its requests went on elsewhere if there is another replica. GET /mesh shows the seat.",
            holds="1m",
        ),
        *_burns(FIRST_TOKEN_SLO, "FirstTokenBudget", "First tokens"),
        *_burns(INTER_TOKEN_SLO, "InterTokenBudget", "Tokens"),
        Alert(
            "ExpertMeshServerErrors",
            f"model_name:{m.PREFIX}server_errors:ratio_rate5m > 0.05",
            "critical",
            "{{ $labels.model_name }} answers with errors",
            "{{ $value | humanizePercentage }} of the requests that ended in the last 5 minutes "
            f"failed with {', '.join(m.SERVER_ERRORS)}.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshQueueGrows",
            f"min_over_time({QUEUED}[10m]) > {QUEUE_CAME_TO} and deriv({QUEUED}[10m]) > 0",
            "warning",
            "More requests for {{ $labels.model_name }} come than are served",
            "At least {{ $value }} sequences have been waiting for 10 minutes, and it gets more: "
            "add attention replicas, or limit clients.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshStateFull",
            f"{_each('max', m.KV_CACHE_USAGE)} > 0.95",
            "warning",
            "{{ $labels.engine }} of {{ $labels.model_name }} has no pages left",
            "{{ $value | humanizePercentage }} of its pages are in use: sequences wait or are "
            "preempted. Raise --kv-pages or add attention replicas.",
            holds="10m",
        ),
        Alert(
            "ExpertMeshThrashing",
            f"{window('10m').rate(m.NUM_PREEMPTIONS)} > 0.5",
            "warning",
            "{{ $labels.engine }} of {{ $labels.model_name }} computes the same again and again",
            "{{ $value | humanize }} preemptions a second: too many long sequences for its pages.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshKeysFileFailed",
            f"{Q.select(m.AUTH_KEYS_FILE_FAILED)} > 0",
            "warning",
            "{{ $labels.instance }} cannot read its keys file",
            "The keys it read before stay valid; changes since have no effect.",
            holds="5m",
        ),
    ),
)

STATE = Group(
    "expertmesh-state",
    (
        Alert(
            "ExpertMeshTierReadOnly",
            f"{_each('max', m.TIER_READ_ONLY)} > 0",
            "warning",
            "The {{ $labels.tier }} tier of {{ $labels.engine }} takes no more state",
            "Its device is full, slow or broken. Requests are served; what falls out of memory is "
            "computed again, and sessions cannot be suspended. See the failures by reason.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshStateCorrupt",
            f"{window('1h').increase(m.TIER_FAILED, reason='=corrupt')} > 0",
            "critical",
            "State in the {{ $labels.tier }} tier of {{ $labels.engine }} is damaged",
            "{{ $value | humanize }} items were not what had been stored. They were refused and "
            "computed again: memory or disk is bad.",
        ),
        Alert(
            "ExpertMeshStateThreadDead",
            f"{_each('max', m.STATE_THREADS_DEAD)} > 0",
            "critical",
            "A background thread of {{ $labels.engine }} has died",
            "Its tier takes nothing more until the replica is started again; the log has the "
            "error.",
            holds="1m",
        ),
        Alert(
            "ExpertMeshStateThreadStuck",
            f"{_each('max', m.STATE_THREADS_STUCK)} > 0",
            "warning",
            "A background thread of {{ $labels.engine }} hangs",
            "Requests go on without what it should bring or keep, and compute that again. If its "
            "disk does not answer, nothing but the disk can help.",
            holds="1m",
        ),
        Alert(
            "ExpertMeshStateLoadsFail",
            f"{per(window('10m').rate(m.STATE_LOADS_FAILED), window('10m').rate(m.STATE_LOADS))} "
            "> 0.5",
            "warning",
            "Cached state does not come back to {{ $labels.engine }} of {{ $labels.model_name }}",
            "{{ $value | humanizePercentage }} of the loads failed, and their prompts were "
            "computed instead. See the failures by reason.",
            holds="10m",
        ),
        # Without a disk a session lasts for as long as memory has room: that is no alarm.
        Alert(
            "ExpertMeshSessionsLost",
            f"{window('1h').increase(m.STATE_SESSIONS_LOST)} > 0 "
            f"and on ({', '.join((*SERVER, *m.STATE_SESSIONS_LOST.labels))}) "
            f"{Q.select(m.TIER_CAPACITY_BYTES, tier='=disk')}",
            "warning",
            "Sessions of {{ $labels.engine }} have lost their state although there is a disk",
            "{{ $value | humanize }} requests computed their session again within an hour. See "
            "whether the disk takes state, and the failures by reason.",
        ),
    ),
)

_PROGRESS = window("15m").increase(m.MOVED_EXPERTS)
MESH = Group(
    "expertmesh-mesh",
    (
        Alert(
            "ExpertMeshExpertDown",
            f"{_each('min', m.EXPERT_UP)} == 0",
            "critical",
            "Expert actor {{ $labels.seat }} of {{ $labels.model_name }} is down",
            "The mesh serves on with the copies of its experts while it is replaced.",
            holds="1m",
        ),
        Alert(
            "ExpertMeshUnserviceable",
            f"{Q.now(m.MESH_STATE, state='=unserviceable')} == 1",
            "critical",
            "Nothing can hold the experts of {{ $labels.model_name }}",
            "Too few expert actors are left. New requests get 503 with the reason; running ones "
            "wait. GET /mesh says what is missing.",
            holds="30s",
        ),
        Alert(
            "ExpertMeshMembersMissing",
            f"{Q.now(m.MESH_DESIRED)} > {Q.now(m.MESH_MEMBERS)}",
            "warning",
            "{{ $labels.model_name }} lacks {{ $labels.kind }} workers",
            "{{ $value }} are wanted, fewer are there: no node has room, or they do not come up.",
            holds="10m",
        ),
        Alert(
            "ExpertMeshRequestsHeld",
            f"{Q.now(m.HELD_REQUESTS)} > 0",
            "critical",
            "Requests to {{ $labels.model_name }} wait for an epoch",
            "{{ $value }} requests are held: the mesh recovers, and takes long about it.",
            holds="1m",
        ),
        Alert(
            "ExpertMeshFailsOver",
            f"{window('1h').increase(m.FAILOVERS)} > 3",
            "warning",
            "Actors of {{ $labels.model_name }} are lost again and again",
            "{{ $value | humanize }} failovers within an hour. GET /mesh has the last cause.",
        ),
        Alert(
            "ExpertMeshUnbalanced",
            f"{Q.now(m.LOAD_BALANCEDNESS, layers='=mean')} < 0.6",
            "warning",
            "Expert actors of {{ $labels.model_name }} wait for the slowest of them",
            "Mean over largest load is {{ $value | humanizePercentage }}. "
            "POST /mesh/rebalance, or set a rebalance period and spare slots.",
            holds="30m",
        ),
        Alert(
            "ExpertMeshRebalanceStuck",
            f"{Q.now(m.REBALANCE_RUNNING)} == 1 and {_PROGRESS} == 0",
            "warning",
            "A rebalance of {{ $labels.model_name }} does not get on",
            "One is under way and has moved nothing for 15 minutes.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshRebalancesFail",
            f"{window('1h').increase(m.REBALANCES, outcome='=failed')} > 3",
            "warning",
            "Rebalances of {{ $labels.model_name }} are given up",
            "{{ $value | humanize }} within an hour. GET /mesh has the last reason.",
        ),
        Alert(
            "ExpertMeshMovedExpertDamaged",
            f"{window('1h').increase(m.CHECKSUM_FAILURES)} > 0",
            "critical",
            "Experts of {{ $labels.model_name }} arrive damaged",
            "A moved copy was not what had been sent and was refused: memory or network is bad.",
        ),
        Alert(
            "ExpertMeshDeadExperts",
            f"{Q.now(m.DEAD_EXPERTS)} > 0",
            "warning",
            "Experts of {{ $labels.model_name }} get no tokens",
            "{{ $value }} (layer, expert) pairs without hits though some are expected. "
            "`expertmesh routing report` shows which.",
            holds="5m",
        ),
        Alert(
            "ExpertMeshRouterCollapses",
            f"{Q.now(m.ROUTING_ALARMS_ACTIVE, kind='!=dead_expert')} > 0",
            "critical",
            "The router of {{ $labels.model_name }} is ill: {{ $labels.kind }}",
            "{{ $value }} layers in alarm. Answers may be wrong; see the entropy panel.",
            holds="1m",
        ),
    ),
)

GROUPS = (RECORDS, SERVING, STATE, MESH)
ALERTS = tuple(alert for group in GROUPS for alert in group.alerts)
