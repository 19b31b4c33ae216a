"""Prometheus metrics of the front door, and of engines and mesh behind it at scrape time."""

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from expertmesh import __version__
from expertmesh.actors.attention import timings
from expertmesh.actors.attention.messages import EngineStats
from expertmesh.cluster import metrics
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.cluster.metrics import Metric
from expertmesh.deploy.openai.engine_telemetry import EngineCollector
from expertmesh.deploy.openai.errors import KEY_LIMITS, ApiError
from expertmesh.deploy.openai.generation import Generation
from expertmesh.deploy.openai.mesh_telemetry import MeshCollector

_ERROR_TYPES = {
    404: "not_found", 429: "overload", 503: "unavailable", 504: "timeout", 500: "internal",
}  # fmt: skip


class Telemetry:
    """One registry per app: two apps in a process (tests, one-process mode) do not collide."""

    def __init__(
        self,
        model_name: str,
        in_flight: Callable[[], float],
        ready: Callable[[], bool] | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._engines = EngineCollector(model_name)
        self.registry.register(self._engines)
        self._mesh = MeshCollector(model_name)
        self.registry.register(self._mesh)
        ProcessCollector(registry=self.registry)
        self._model = model_name
        self._watched: list[tuple[Gauge, Callable[[], float]]] = []
        self._success = self._counter(metrics.REQUEST_SUCCESS)
        self._failures = self._counter(metrics.REQUEST_FAILURES)
        # Zeros too: a rate needs to have seen a counter before it grows.
        for reason in metrics.FINISH_REASONS:
            self._success.labels(model_name, reason)
        for kind in metrics.ERROR_TYPES:
            self._failures.labels(model_name, kind)
        self._prompt = self._counter(metrics.PROMPT_TOKENS).labels(model_name)
        self._generated = self._counter(metrics.GENERATION_TOKENS).labels(model_name)
        self._first = self._histogram(metrics.TIME_TO_FIRST_TOKEN)
        self._between = self._histogram(metrics.INTER_TOKEN_LATENCY)
        self._whole = self._histogram(metrics.E2E_LATENCY)
        self._prompt_size = self._histogram(metrics.REQUEST_PROMPT_TOKENS)
        self._answer_size = self._histogram(metrics.REQUEST_GENERATION_TOKENS)
        self._watch(metrics.HTTP_REQUESTS_IN_FLIGHT, in_flight)
        if ready is not None:
            self._watch(metrics.READY, lambda: float(ready()))
        self._gauge(metrics.BUILD_INFO).labels(model_name, __version__).set(1)
        self._optional: dict[Metric, Counter] = {}
        self._wait: Histogram | None = None

    def _counter(self, metric: Metric) -> Counter:
        return Counter(metric.full_name, metric.help, metric.labels, registry=self.registry)

    def _gauge(self, metric: Metric) -> Gauge:
        return Gauge(metric.full_name, metric.help, metric.labels, registry=self.registry)

    def _watch(self, metric: Metric, read: Callable[[], float]) -> None:
        self._watched.append((self._gauge(metric).labels(self._model), read))

    def _histogram(self, metric: Metric) -> Histogram:
        return Histogram(
            metric.full_name,
            metric.help,
            metric.labels,
            buckets=metric.buckets,
            registry=self.registry,
        ).labels(self._model)

    # --- requests -----------------------------------------------------------------------------

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
        if error.code in KEY_LIMITS:
            kind = "rate_limit"
        self._failures.labels(self._model, kind).inc()

    def cancelled(self) -> None:
        """The client went away before the end."""
        self._failures.labels(self._model, "cancelled").inc()

    # --- what not every server has ------------------------------------------------------------

    def watch_queue(self, queued: Callable[[], float]) -> None:
        """queued: requests that wait for their turn in this front door. Call once."""
        self._watch(metrics.ADMISSION_QUEUED, queued)
        self._wait = self._histogram(metrics.ADMISSION_WAIT)
        for reason in metrics.ADMISSION_REASONS:
            self._once(metrics.ADMISSION_REFUSALS).labels(self._model, reason)

    def admitted(self, seconds: float) -> None:
        """A request that had waited for so long got its turn. After watch_queue."""
        assert self._wait is not None, "watch_queue first"
        self._wait.observe(seconds)

    def refused(self, reason: str) -> None:
        """reason: one of metrics.ADMISSION_REASONS."""
        assert reason in metrics.ADMISSION_REASONS, reason
        self._once(metrics.ADMISSION_REFUSALS).labels(self._model, reason).inc()

    def unauthenticated(self, reason: str) -> None:
        """reason: one of metrics.AUTH_REASONS."""
        assert reason in metrics.AUTH_REASONS, reason
        self._once(metrics.AUTH_FAILURES).labels(self._model, reason).inc()

    def watch_keys(self, state: Callable[[], tuple[float, float]]) -> None:
        """state: (usable keys, 1.0 when their file could not be read). Call once."""
        self._watch(metrics.AUTH_KEYS, lambda: state()[0])
        self._watch(metrics.AUTH_KEYS_FILE_FAILED, lambda: state()[1])
        for reason in metrics.AUTH_REASONS:
            self._once(metrics.AUTH_FAILURES).labels(self._model, reason)

    def watch_placements(self) -> None:
        """There are replicas to choose from."""
        for reason in metrics.PLACEMENT_REASONS:
            self._once(metrics.PLACEMENTS).labels(self._model, reason)

    def placed(self, reason: str) -> None:
        """A replica has taken a request. reason: one of metrics.PLACEMENT_REASONS."""
        assert reason in metrics.PLACEMENT_REASONS, reason
        self._once(metrics.PLACEMENTS).labels(self._model, reason).inc()

    def grpc_finished(self, method: str, code: str) -> None:
        """A call has ended. method: the procedure's short name. code: such as "OK"."""
        self._once(metrics.GRPC_REQUESTS).labels(self._model, method, code).inc()

    def _once(self, metric: Metric) -> Counter:
        """Registered when first counted: a server without the feature does not show it."""
        known = self._optional.get(metric)
        if known is None:
            known = self._optional[metric] = self._counter(metric)
        return known

    # --- reading ------------------------------------------------------------------------------

    def exposition(
        self,
        stats: Mapping[str, EngineStats | None],
        mesh: MeshStats | None = None,
        open_metrics: bool = False,
    ) -> bytes:
        """`look` and `text` in one."""
        self.look(stats, mesh)
        return self.text(open_metrics)

    def look(self, stats: Mapping[str, EngineStats | None], mesh: MeshStats | None) -> None:
        """Takes down how things are now. mesh: None when nothing is known of one. On the front
        door's event loop: what is watched changes there."""
        self._engines.stats, self._mesh.stats = stats, mesh
        for gauge, read in self._watched:
            gauge.set(read())

    def text(self, open_metrics: bool = False) -> bytes:
        """What `look` has seen last, and all counters. From any thread, one at a time."""
        text = openmetrics.generate_latest if open_metrics else generate_latest
        return text(_WithoutCreated(self.registry))

    def totals(self) -> dict[str, float]:
        """Sums of this front door's counters. answers: choices that ended well. errors: requests
        that failed by the server's doing; others: by the client's, cancelled ones included."""
        found = {"answers": 0.0, "errors": 0.0, "others": 0.0}
        for counter in (self._success, self._failures):
            for sample in _samples(counter):
                if sample.name.endswith("_total"):
                    kind = sample.labels.get("error_type", "")
                    mine = "errors" if kind in metrics.SERVER_ERRORS else "others"
                    found[mine if kind else "answers"] += sample.value
        return found

    def latencies(self) -> dict[str, timings.Histogram]:
        """Of streams: time to the first token, and between tokens, since the start."""
        return {"ttft": _observed(self._first), "itl": _observed(self._between)}


class _WithoutCreated(Collector):
    """The library adds a series with its time of birth to every counter and histogram; Prometheus
    notices a restart by the counter going back."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Family]:
        for family in self._registry.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


def _samples(metric: Counter | Histogram) -> Iterable[Sample]:
    return (sample for family in metric.collect() for sample in family.samples)


def _observed(metric: Histogram) -> timings.Histogram:
    buckets = [(s.labels["le"], s.value) for s in _samples(metric) if s.name.endswith("_bucket")]
    below = [0, *(int(count) for _, count in buckets)]
    total = next(s.value for s in _samples(metric) if s.name.endswith("_sum"))
    return timings.Histogram(
        bounds=tuple(float(bound) for bound, _ in buckets[:-1]),
        counts=[after - before for before, after in pairwise(below)],
        total=total,
    )
