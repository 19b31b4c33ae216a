"""The dashboard of the mesh: who is in it, who carries how much, and what has happened to it."""

from expertmesh.cluster import metrics as m
from expertmesh.deploy.observability.panels import Board, Panel, Row, Target, Variable
from expertmesh.deploy.observability.promql import Query, over, per, total
from expertmesh.deploy.observability.serving_board import MODEL

Q = Query("$__rate_interval", variables=True)
NOTHING_LOST = "nothing was lost yet"
NEVER_BALANCED = "nothing was rebalanced yet"

SEAT = Variable(
    "seat",
    "Seat",
    f'label_values({{__name__=~"{m.EXPERT_UP.full_name}|{m.ROUTED_ROWS.exposed[0]}",'
    'model_name=~"$model_name"}, seat)',
)

MEMBERS = Row(
    "Members",
    (
        Panel(
            "State",
            "The mesh's own word: ready, recovering, unserviceable or stopped.",
            (Target(f"{Q.now(m.MESH_STATE)} == 1", "{{state}}"),),
            view="stat",
            unit="none",
            width=4,
        ),
        Panel(
            "Epoch",
            "Number of the running set of ranks; every change of members makes a new one.",
            (Target(over("max", Q.select(m.MESH_EPOCH))),),
            view="stat",
            unit="none",
            width=4,
        ),
        Panel(
            "Workers there and wanted",
            "By kind; a lost worker is replaced in its seat.",
            (
                Target(over("max", Q.select(m.MESH_MEMBERS), "kind"), "{{kind}}"),
                Target(over("max", Q.select(m.MESH_DESIRED), "kind"), "{{kind}} wanted"),
            ),
        ),
        Panel(
            "Expert actors up",
            "1: answers and serves. By seat, whoever sits there.",
            (Target(over("min", Q.select(m.EXPERT_UP), "seat"), "{{seat}}"),),
            unit="bool",
            maximum=1,
        ),
        Panel(
            "Losses, joins and failovers",
            "Events in the window: workers lost, epochs begun for it, successors that came or not.",
            (
                Target(total(Q.increase(m.LOSSES)), "lost"),
                Target(total(Q.increase(m.FAILOVERS)), "failovers"),
                Target(total(Q.increase(m.JOINS)), "joined"),
                Target(total(Q.increase(m.FAILED_JOINS)), "did not come up"),
            ),
        ),
        Panel(
            "Last recovery",
            "From the last loss to the epoch that served again.",
            (Target(over("max", Q.select(m.LAST_RECOVERY))),),
            unit="s",
            view="stat",
            width=4,
            may_be_empty=NOTHING_LOST,
        ),
        Panel(
            "Requests held",
            "Requests that wait for the next epoch instead of failing.",
            (Target(total(Q.now(m.HELD_REQUESTS)), "held"),),
            width=4,
        ),
        Panel(
            "Epoch and routing version",
            "A version is a placement; copies move within an epoch.",
            (
                Target(over("max", Q.select(m.MESH_EPOCH)), "epoch"),
                Target(over("max", Q.select(m.ROUTING_VERSION)), "routing version"),
            ),
        ),
    ),
)

_BUSY, _ROWS = Q.rate(m.EXPERT_BUSY_SECONDS), Q.rate(m.EXPERT_ROWS)

BALANCE = Row(
    "Load and balance",
    (
        Panel(
            "Rows per second by expert actor",
            "One per (token, MoE layer) that reaches the actor.",
            (Target(total(_ROWS, "seat"), "{{seat}}"),),
            unit="ops",
            stacked=True,
        ),
        Panel(
            "Load against the mean",
            "Busy time of each actor over the mean of all: 1 is even, the largest sets the pace.",
            (
                Target(
                    per(
                        total(_BUSY, "model_name", "seat"),
                        "on (model_name) group_left () "
                        + over("avg", total(_BUSY, "model_name", "seat"), "model_name"),
                    ),
                    "{{seat}}",
                ),
            ),
        ),
        Panel(
            "Imbalance now",
            "Largest over mean of the expert actors: rows and busy time, over all layers.",
            (
                Target(per(f"max({total(_ROWS, 'seat')})", f"avg({total(_ROWS, 'seat')})"), "rows"),
                Target(per(f"max({total(_BUSY, 'seat')})", f"avg({total(_BUSY, 'seat')})"), "busy"),
            ),
        ),
        Panel(
            "Balancedness per layer",
            "Mean over largest load of the expert actors, 1 is even: worst layer, mean of layers. "
            "From the ledger's decayed windows.",
            (Target(over("min", Q.select(m.LOAD_BALANCEDNESS), "layers"), "{{layers}}"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Fan-out",
            "Distinct expert actors per token and layer: what the exchange has to carry.",
            (Target(per(total(Q.rate(m.DISPATCHED_ROWS)), total(Q.rate(m.ROUTED_ROWS))), "rows"),),
        ),
        Panel(
            "Busy expert actors",
            "Share of the time in which each computes.",
            (Target(total(_BUSY, "seat"), "{{seat}}"),),
            unit="percentunit",
        ),
        Panel(
            "Exchange per attention replica",
            "Seconds per second spent sending rows and waiting for partial sums.",
            (
                Target(total(Q.rate(m.DISPATCH_SECONDS), "seat"), "dispatch {{seat}}"),
                Target(total(Q.rate(m.COMBINE_SECONDS), "seat"), "combine {{seat}}"),
            ),
            unit="s",
        ),
        Panel(
            "Exchange per row",
            "Mean seconds of a routed row, dispatch and combine together.",
            (
                Target(
                    per(
                        f"({total(Q.rate(m.DISPATCH_SECONDS))} + "
                        f"{total(Q.rate(m.COMBINE_SECONDS))})",
                        total(Q.rate(m.ROUTED_ROWS)),
                    ),
                    "per row",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Expert bytes",
            "Weights as in the checkpoint, and what is kept decoded beside them.",
            (
                Target(total(Q.now(m.EXPERT_WEIGHT_BYTES), "seat"), "weights {{seat}}"),
                Target(total(Q.now(m.EXPERT_CACHE_BYTES), "seat"), "decoded {{seat}}"),
            ),
            unit="bytes",
        ),
    ),
)

ROUTING = Row(
    "Router health",
    (
        Panel(
            "Alarms that hold",
            "Experts (dead_expert) or layers (the other kinds) in alarm.",
            (Target(total(Q.now(m.ROUTING_ALARMS_ACTIVE), "kind"), "{{kind}}"),),
        ),
        Panel(
            "Dead experts",
            "(layer, expert) pairs without hits though some are expected.",
            (Target(total(Q.now(m.DEAD_EXPERTS)), "dead"),),
        ),
        Panel(
            "Entropy of the routing",
            "Of the layer where it is least, 0 to 1; a falling one means a collapsing router.",
            (Target(over("min", Q.select(m.ROUTING_ENTROPY)), "least"),),
            unit="percentunit",
            maximum=1,
        ),
        Panel(
            "Alarms raised",
            "In the window, by kind.",
            (Target(total(Q.increase(m.ROUTING_ALARMS), "kind"), "{{kind}}"),),
        ),
        Panel(
            "Rebalances",
            "In the window, by outcome; running: one is under way.",
            (
                Target(total(Q.increase(m.REBALANCES), "outcome"), "{{outcome}}"),
                Target(over("max", Q.select(m.REBALANCE_RUNNING)), "running"),
            ),
        ),
        Panel(
            "Moved",
            "Weights that rebalances move, per second.",
            (Target(total(Q.rate(m.MOVED_BYTES)), "bytes"),),
            unit="Bps",
        ),
        Panel(
            "Moved experts and damage",
            "Copies moved in the window, and those that were not what had been sent.",
            (
                Target(total(Q.increase(m.MOVED_EXPERTS)), "moved"),
                Target(total(Q.increase(m.CHECKSUM_FAILURES)), "damaged"),
            ),
        ),
        Panel(
            "Since the last rebalance",
            "Of those that were carried out.",
            (Target(f"time() - {over('max', Q.now(m.LAST_REBALANCE))}"),),
            unit="s",
            view="stat",
            may_be_empty=NEVER_BALANCED,
        ),
    ),
)

BOARD = Board(
    uid="expertmesh-mesh",
    title="ExpertMesh / Mesh and experts",
    description="Members, load balance, router health and rebalancing of an ExpertMesh.",
    rows=(MEMBERS, BALANCE, ROUTING),
    variables=(MODEL, SEAT),
    marks=(
        ("New epoch", f"changes({Q.select(m.MESH_EPOCH)}[$__rate_interval]) > 0"),
        ("Rebalance", f"changes({Q.select(m.LAST_REBALANCE)}[$__rate_interval]) > 0"),
    ),
)
