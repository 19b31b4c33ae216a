"""The mesh's counters at scrape time: read from its keeper's message, never kept here.

So a seat that has left the mesh has left the next scrape, and a failing one is never hidden behind
another's value. When the keeper does not answer, the series are absent, not stale.
"""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from expertmesh.cluster import metrics
from expertmesh.cluster.ledger.stats import ALARM_KINDS, MESH_STATES, MeshStats, RoutingStats
from expertmesh.cluster.metrics import Metric

Family = GaugeMetricFamily | CounterMetricFamily
OUTCOMES = ("done", "failed")


class MeshCollector(Collector):
    """stats: of this scrape; None without a mesh."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats: MeshStats | None = None

    def collect(self) -> Iterable[Family]:
        if self.stats is None:
            return
        yield from self._actors(self.stats)
        yield from self._replicas(self.stats)
        yield from self._routing(self.stats.routing)
        yield from self._membership(self.stats)

    def _actors(self, stats: MeshStats) -> Iterable[Family]:
        yield self._by(metrics.EXPERT_UP, {a.seat: float(a.up) for a in stats.actors})
        # Zeros of one that is down would read as restarted counters.
        actors = [actor for actor in stats.actors if actor.up]
        yield self._by(metrics.EXPERT_ROWS, {a.seat: a.rows for a in actors})
        yield self._by(metrics.EXPERT_BUSY_SECONDS, {a.seat: a.busy_seconds for a in actors})
        yield self._by(metrics.EXPERT_WEIGHT_BYTES, {a.seat: a.weight_bytes for a in actors})
        yield self._by(metrics.EXPERT_CACHE_BYTES, {a.seat: a.cache_bytes for a in actors})

    def _replicas(self, stats: MeshStats) -> Iterable[Family]:
        replicas = stats.replicas
        yield self._by(metrics.DISPATCHED_ROWS, {r.seat: r.rows_sent for r in replicas})
        yield self._by(metrics.ROUTED_ROWS, {r.seat: r.routed_rows for r in replicas})
        yield self._by(metrics.DISPATCH_SECONDS, {r.seat: r.dispatch_seconds for r in replicas})
        yield self._by(metrics.COMBINE_SECONDS, {r.seat: r.combine_seconds for r in replicas})

    def _routing(self, routing: RoutingStats) -> Iterable[Family]:
        balanced = {"worst": routing.balancedness_worst, "mean": routing.balancedness_mean}
        yield self._by(metrics.LOAD_BALANCEDNESS, balanced)
        yield self._one(metrics.ROUTING_ENTROPY, routing.entropy_min)
        yield self._one(metrics.DEAD_EXPERTS, routing.dead_experts)
        # Zeros too: a rate needs to have seen the counter before it grows.
        told = {kind: routing.alarms.get(kind, 0) for kind in ALARM_KINDS}
        active = {kind: routing.alarms_active.get(kind, 0) for kind in ALARM_KINDS}
        yield self._by(metrics.ROUTING_ALARMS, told)
        yield self._by(metrics.ROUTING_ALARMS_ACTIVE, active)

    def _membership(self, stats: MeshStats) -> Iterable[Family]:
        states = {state: float(state == stats.state) for state in MESH_STATES}
        yield self._by(metrics.MESH_STATE, states)
        yield self._by(metrics.MESH_MEMBERS, dict(stats.members))
        yield self._by(metrics.MESH_DESIRED, dict(stats.desired))
        yield self._one(metrics.MESH_EPOCH, stats.epoch)
        yield self._one(metrics.ROUTING_VERSION, stats.routing_version)
        yield self._one(metrics.LOSSES, stats.losses)
        yield self._one(metrics.JOINS, stats.joins)
        yield self._one(metrics.FAILED_JOINS, stats.failed_joins)
        yield self._one(metrics.FAILOVERS, stats.failovers)
        yield self._one(metrics.LAST_RECOVERY, stats.last_recovery)
        yield self._one(metrics.REBALANCE_RUNNING, float(stats.rebalancing))
        outcomes = {outcome: stats.rebalances.get(outcome, 0) for outcome in OUTCOMES}
        yield self._by(metrics.REBALANCES, outcomes)
        yield self._one(metrics.LAST_REBALANCE, stats.last_rebalance)
        yield self._one(metrics.MOVED_EXPERTS, stats.moved_experts)
        yield self._one(metrics.MOVED_BYTES, stats.moved_bytes)
        yield self._one(metrics.CHECKSUM_FAILURES, stats.checksum_failures)
        yield self._one(metrics.HELD_REQUESTS, stats.held_requests)

    def _one(self, metric: Metric, value: float | None) -> Family:
        family = self._family(metric)
        if value is not None:
            family.add_metric([self._model], value)
        return family

    def _by(self, metric: Metric, values: Mapping[str, float | None]) -> Family:
        """values: by the metric's label besides the model's name."""
        family = self._family(metric)
        for label, value in values.items():
            if value is not None:
                family.add_metric([self._model, label], value)
        return family

    def _family(self, metric: Metric) -> Family:
        kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
        return kind(metric.full_name, metric.help, labels=metric.labels)
