"""Prometheus metrics of the front door, and of the engines behind it at scrape time."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.cluster import metrics
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.cluster.metrics import Metric
from expertmesh.deploy.openai.errors import ApiError
from expertmesh.deploy.openai.generation import Generation
from expertmesh.deploy.openai.mesh_telemetry import MeshCollector

_ERROR_TYPES = {
    404: "not_found", 429: "overload", 503: "unavailable", 504: "timeout", 500: "internal",
}  # fmt: skip


class Telemetry:
    """One registry per app: two apps in a process (tests, one-process mode) do not collide."""

    def __init__(self, model_name: str, in_flight: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self._engines = EngineCollector(model_name)
        self.registry.register(self._engines)
        self._mesh = MeshCollector(model_name)
        self.registry.register(self._mesh)
        self._model = model_name
        self._success = self._counter(metrics.REQUEST_SUCCESS)
        self._failures = self._counter(metrics.REQUEST_FAILURES)
        self._prompt = self._counter(metrics.PROMPT_TOKENS).labels(model_name)
        self._generated = self._counter(metrics.GENERATION_TOKENS).labels(model_name)
        self._first = self._histogram(metrics.TIME_TO_FIRST_TOKEN)
        self._between = self._histogram(metrics.INTER_TOKEN_LATENCY)
        self._whole = self._histogram(metrics.E2E_LATENCY)
        self._prompt_size = self._histogram(metrics.REQUEST_PROMPT_TOKENS)
        self._answer_size = self._histogram(metrics.REQUEST_GENERATION_TOKENS)
        gauge = metrics.HTTP_REQUESTS_IN_FLIGHT
        Gauge(gauge.full_name, gauge.help, gauge.labels, registry=self.registry).labels(
            model_name
        ).set_function(in_flight)

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.full_name, metric.help, metric.labels, registry=self.registry)

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.full_name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self.registry,
        ).labels(self._model)

    def first_token(self, seconds: float) -> None:
        self._first.observe(seconds)

    def between_tokens(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, generation: Generation) -> None:
        """An answer that was sent whole."""
        for reason in generation.finish_reasons:
            self._success.labels(self._model, reason).inc()
        usage = generation.usage()
        self._count(generation, usage["prompt_tokens"], usage["completion_tokens"])

    def _count(self, generation: Generation, prompt: int, generated: int) -> None:
        self._prompt.inc(prompt)
        self._generated.inc(generated)
        self._prompt_size.observe(prompt)
        self._answer_size.observe(generated)
        self._whole.observe(time.perf_counter() - generation.arrived)

    def failed(self, error: ApiError) -> None:
        kind = _ERROR_TYPES.get(error.status, "validation" if error.status < 500 else "internal")
        self._failures.labels(self._model, kind).inc()

    def cancelled(self) -> None:
        """The client went away before the end."""
        self._failures.labels(self._model, "cancelled").inc()

    def exposition(
        self, stats: Mapping[str, EngineStats | None], mesh: MeshStats | None = None
    ) -> bytes:
        """The text format, engines and mesh as they are now. mesh: None when nothing is known."""
        self._engines.stats, self._mesh.stats = stats, mesh
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Engine counters live in the engines: they are read, never added up here."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats: Mapping[str, EngineStats | None] = {}

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        def gauge(metric: Metric, values: Mapping[str, float]) -> GaugeMetricFamily:
            family = GaugeMetricFamily(metric.full_name, metric.help, labels=metric.labels)
            for engine, value in values.items():
                family.add_metric([self._model, engine], value)
            return family

        def counter(metric: Metric, values: Mapping[str, float]) -> CounterMetricFamily:
            family = CounterMetricFamily(metric.full_name, metric.help, labels=metric.labels)
            for engine, value in values.items():
                family.add_metric([self._model, engine], value)
            return family

        # Of an engine that is down only that is known. Zeros would read as restarted counters.
        stats = {engine: one for engine, one in self.stats.items() if one is not None}
        up = {e: float(s is not None and s.failed is None) for e, s in self.stats.items()}
        yield gauge(metrics.NUM_REQUESTS_RUNNING, {e: s.running for e, s in stats.items()})
        yield gauge(metrics.NUM_REQUESTS_WAITING, {e: s.waiting for e, s in stats.items()})
        yield gauge(
            metrics.KV_CACHE_USAGE,
            {e: _used(s.pages_free, s.pages_total) for e, s in stats.items()},
        )
        yield gauge(
            metrics.STATE_SLOT_USAGE,
            {e: _used(s.slots_free, s.slots_total) for e, s in stats.items()},
        )
        yield gauge(metrics.ENGINE_UP, up)
        yield counter(metrics.NUM_PREEMPTIONS, {e: s.preemptions for e, s in stats.items()})
        yield counter(metrics.ENGINE_STEPS, {e: s.steps for e, s in stats.items()})
        yield counter(metrics.ENGINE_PROMPT_TOKENS, {e: s.prompt_tokens for e, s in stats.items()})
        yield counter(
            metrics.ENGINE_GENERATION_TOKENS, {e: s.generation_tokens for e, s in stats.items()}
        )
        yield counter(
            metrics.ENGINE_RECOMPUTED_TOKENS, {e: s.recomputed_tokens for e, s in stats.items()}
        )
        seconds = metrics.ENGINE_STEP_SECONDS
        family = CounterMetricFamily(seconds.full_name, seconds.help, labels=seconds.labels)
        for engine, one in stats.items():
            for phase in ("plan", "forward", "sample", "publish"):
                family.add_metric([self._model, engine, phase], getattr(one, f"{phase}_seconds"))
        yield family


def _used(free: int, total: int) -> float:
    return 1 - free / total if total else 0.0
