"""What the server's speed is held to. Dashboards and alerts read it here."""

from dataclasses import dataclass

from expertmesh.cluster.metrics import INTER_TOKEN_LATENCY, TIME_TO_FIRST_TOKEN, Metric


@dataclass(frozen=True, slots=True)
class Objective:
    """`share` of the observations shall be within `bound` seconds, which is one of the buckets.

    No whole seconds: scrapers differ in how they write the label of such a bucket.
    """

    name: str
    metric: Metric
    bound: float
    share: float

    def __post_init__(self) -> None:
        assert self.bound in self.metric.buckets and self.bound % 1, self.name


FIRST_TOKEN_SLO = Objective("first_token", TIME_TO_FIRST_TOKEN, 2.5, 0.99)
INTER_TOKEN_SLO = Objective("inter_token", INTER_TOKEN_LATENCY, 0.2, 0.99)
