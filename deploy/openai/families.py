"""Metric families of the client library, made from what is read at scrape time."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from expertmesh.cluster.metrics import Metric

Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily
# (values of the metric's labels, value)
Samples = Iterable[tuple[list[str], float]]


def family(metric: Metric, samples: Samples) -> GaugeMetricFamily | CounterMetricFamily:
    """A gauge's or a counter's."""
    kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
    made = kind(metric.full_name, metric.help, labels=metric.labels)
    for labels, value in samples:
        made.add_metric(labels, value)
    return made
