"""The engines' counters at scrape time: they live in the engines, and are read, never added up."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.attention.timings import Histogram
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.cluster import metrics
from expertmesh.cluster.metrics import Metric
from expertmesh.deploy.openai.families import Family, Samples, family
from expertmesh.deploy.openai.state_telemetry import state_families

_PLAIN: tuple[tuple[Metric, Callable[[EngineStats], float]], ...] = (
    (metrics.NUM_REQUESTS_RUNNING, lambda s: s.running),
    (metrics.NUM_REQUESTS_WAITING, lambda s: s.waiting),
    (metrics.KV_CACHE_USAGE, lambda s: _used(s.pages_free, s.pages_total)),
    (metrics.STATE_SLOT_USAGE, lambda s: _used(s.slots_free, s.slots_total)),
    (metrics.NUM_PREEMPTIONS, lambda s: s.preemptions),
    (metrics.ENGINE_STEPS, lambda s: s.steps),
    (metrics.ENGINE_PROMPT_TOKENS, lambda s: s.prompt_tokens),
    (metrics.ENGINE_GENERATION_TOKENS, lambda s: s.generation_tokens),
    (metrics.ENGINE_RECOMPUTED_TOKENS, lambda s: s.recomputed_tokens),
)
_HISTOGRAMS: tuple[tuple[Metric, Callable[[EngineStats], Histogram]], ...] = (
    (metrics.REQUEST_QUEUE_TIME, lambda s: s.timings.queue),
    (metrics.REQUEST_PREFILL_TIME, lambda s: s.timings.prefill),
    (metrics.REQUEST_DECODE_TIME, lambda s: s.timings.decode),
    (metrics.REQUEST_INFERENCE_TIME, lambda s: s.timings.inference),
    (metrics.TIME_PER_OUTPUT_TOKEN, lambda s: s.timings.per_token),
    (metrics.ITERATION_TOKENS, lambda s: s.timings.step_tokens),
)


class EngineCollector(Collector):
    """stats: of this scrape, by engine; None for one that is down."""

    def __init__(self, model_name: str) -> None:
        self._model = model_name
        self.stats: Mapping[str, EngineStats | None] = {}

    def collect(self) -> Iterable[Family]:
        up = {e: float(s is not None and s.failed is None) for e, s in self.stats.items()}
        yield family(metrics.ENGINE_UP, (([self._model, e], value) for e, value in up.items()))
        # Of an engine that is down only that is known. Zeros would read as restarted counters.
        stats = {engine: one for engine, one in self.stats.items() if one is not None}
        for metric, read in _PLAIN:
            yield family(metric, (([self._model, e], read(s)) for e, s in stats.items()))
        yield family(metrics.ENGINE_STEP_SECONDS, self._steps(stats))
        yield family(metrics.CACHE_CONFIG_INFO, self._cache(stats))
        yield from state_families(self._model, stats)
        for metric, histogram in _HISTOGRAMS:
            observed = HistogramMetricFamily(metric.full_name, metric.help, labels=metric.labels)
            for engine, one in stats.items():
                add_histogram(observed, [self._model, engine], histogram(one))
            yield observed

    def _steps(self, stats: Mapping[str, EngineStats]) -> Samples:
        for engine, one in stats.items():
            for phase in metrics.STEP_PHASES:
                yield [self._model, engine, phase], getattr(one, f"{phase}_seconds")

    def _cache(self, stats: Mapping[str, EngineStats]) -> Samples:
        for engine, one in stats.items():
            yield [self._model, engine, str(PAGE_TOKENS), str(one.pages_total)], 1.0


def add_histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    below, buckets = 0, []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        below += count
        buckets.append((floatToGoString(bound), below))  # type: ignore[no-untyped-call]
    family.add_metric(labels, buckets, histogram.total)


def _used(free: int, total: int) -> float:
    return 1 - free / total if total else 0.0
