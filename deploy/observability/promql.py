"""Queries from metric definitions, so that no dashboard or rule names what is not exported.

Every front door of a server shows the same engines and the same mesh. What they share is taken once
(the largest, by server and all labels of the metric) before anything is added up, or three doors
would show three times the traffic.
"""

from dataclasses import dataclass

from expertmesh.cluster.metrics import SHARED, Metric

# Labels that a dashboard has a variable for.
VARIABLES = ("model_name", "engine", "seat")
# What tells servers apart: labels that Prometheus adds, the same for all front doors of one.
SERVER = ("job", "namespace")


@dataclass(frozen=True, slots=True)
class Query:
    """How selectors are written. window: of rates. variables: whether dashboards filter by them."""

    window: str
    variables: bool

    def select(self, metric: Metric, part: str = "", **labels: str) -> str:
        """As each front door shows it. part: bucket, sum or count of a histogram. labels: values
        with the operator first: engine="=~a.*"."""
        name = metric.exposed[0] if not part else f"{metric.full_name}_{part}"
        assert name in metric.exposed, name
        known = [*metric.labels, *(("le",) if part == "bucket" else ())]
        assert all(label in known for label in labels), (metric.name, labels)
        matchers = {}
        if self.variables:
            matchers = {v: f"=~${v}" for v in VARIABLES if v in metric.labels}
        parts = [f"{k}{_operator(v)}" for k, v in (matchers | labels).items()]
        return f"{name}{{{','.join(parts)}}}" if parts else name

    def now(self, metric: Metric, **labels: str) -> str:
        """A gauge."""
        return self._once(metric, self.select(metric, **labels))

    def rate(self, metric: Metric, part: str = "", **labels: str) -> str:
        return self._once(
            metric, f"rate({self.select(metric, part, **labels)}[{self.window}])", part
        )

    def increase(self, metric: Metric, **labels: str) -> str:
        return self._once(metric, f"increase({self.select(metric, **labels)}[{self.window}])")

    def _once(self, metric: Metric, expression: str, part: str = "") -> str:
        if metric not in SHARED:
            return expression
        le = ("le",) if part == "bucket" else ()
        return over("max", expression, *SERVER, *metric.labels, *le)

    def quantile(self, q: float, metric: Metric, *by: str) -> str:
        """Of a histogram over all series that differ in anything but `by`."""
        return f"histogram_quantile({q:g}, {total(self.rate(metric, 'bucket'), 'le', *by)})"

    def mean(self, metric: Metric, *by: str) -> str:
        """Of a histogram."""
        return per(total(self.rate(metric, "sum"), *by), total(self.rate(metric, "count"), *by))


def _operator(value: str) -> str:
    """`=~$seat` as `=~"$seat"`."""
    length = next(n for n in (2, 1) if value[:n] in ("=~", "!~", "!=", "="))
    return f'{value[:length]}"{value[length:]}"'


def total(expression: str, *by: str) -> str:
    return over("sum", expression, *by)


def over(function: str, expression: str, *by: str) -> str:
    """An aggregation: sum, min, max, avg."""
    return f"{function} by ({', '.join(by)}) ({expression})" if by else f"{function}({expression})"


def per(above: str, below: str) -> str:
    return f"{above} / {below}"
