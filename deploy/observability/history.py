"""The last minutes of a server, sampled in its front door: what a page that is opened now shows."""

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.attention.timings import Histogram
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability.scrape import Reading

MINUTES = 10
PERIOD_S = 2.0
# Latencies are of the observations in so many last samples: one sample often has none.
WINDOW = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One sample. t: Unix time. Rates are per second, since the sample before (answers, errors and
    others as Telemetry.totals has them); quantiles in seconds, None without an observation.
    pages, slots: share in use, of the fullest engine. cached: share of the prompt tokens looked up
    that were not computed again, of the last samples; None when none were."""

    t: float
    generated: float = 0.0
    prompt: float = 0.0
    answers: float = 0.0
    errors: float = 0.0
    others: float = 0.0
    ttft50: float | None = None
    ttft95: float | None = None
    itl50: float | None = None
    itl95: float | None = None
    running: int = 0
    waiting: int = 0
    queued: int = 0
    in_flight: int = 0
    pages: float = 0.0
    slots: float = 0.0
    cached: float | None = None
    epoch: int | None = None


COLUMNS = tuple(Point.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    tokens: Mapping[str, tuple[int, int]]
    totals: Mapping[str, float]
    latencies: Mapping[str, Histogram]
    busy: Mapping[str, tuple[int, float]]
    cache: Mapping[str, tuple[int, int]]  # tokens looked up, and hit


class History:
    """`add` a reading now and then; bounded, whatever the uptime."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self.points: deque[Point] = deque(maxlen=round(MINUTES * 60 / PERIOD_S))
        self._samples: deque[_Sample] = deque(maxlen=WINDOW + 1)
        self.engines: Mapping[str, EngineStats | None] = {}
        # seat -> (rows per second, share of the time it computes), of the expert actors.
        self.seats: dict[str, tuple[float, float]] = {}

    def add(self, reading: Reading) -> Point:
        engines = {name: one for name, one in reading.engines.items() if one is not None}
        self.engines = reading.engines
        actors = [] if reading.mesh is None else reading.mesh.actors
        now = _Sample(
            at=reading.at,
            tokens={n: (s.generation_tokens, s.prompt_tokens) for n, s in engines.items()},
            totals=self._front.telemetry.totals(),
            latencies=self._front.telemetry.latencies(),
            busy={a.seat: (a.rows, a.busy_seconds) for a in actors if a.up},
            cache={n: (s.cache.queries, s.cache.hits) for n, s in engines.items()},
        )
        before = self._samples[-1] if self._samples else now
        oldest = self._samples[0] if self._samples else now
        self._samples.append(now)
        seconds = max(now.at - before.at, 1e-3)
        self.seats = {
            seat: (rows / seconds, min(1.0, busy / seconds))
            for seat, (rows, busy) in _grown(before.busy, now.busy).items()
        }
        grown = _grown(before.tokens, now.tokens).values()
        ttft, itl = (_since(oldest.latencies[k], now.latencies[k]) for k in ("ttft", "itl"))
        point = Point(
            t=round(time.time(), 1),
            generated=round(sum(g for g, _ in grown) / seconds, 1),
            prompt=round(sum(p for _, p in grown) / seconds, 1),
            **{
                name: round((total - before.totals[name]) / seconds, 2)
                for name, total in now.totals.items()
            },
            ttft50=quantile(ttft, 0.5),
            ttft95=quantile(ttft, 0.95),
            itl50=quantile(itl, 0.5),
            itl95=quantile(itl, 0.95),
            running=sum(s.running for s in engines.values()),
            waiting=sum(s.waiting for s in engines.values()),
            queued=self._front.admission.waiting,
            in_flight=self._front.traffic.requests,
            pages=max((_used(s.pages_free, s.pages_total) for s in engines.values()), default=0.0),
            slots=max((_used(s.slots_free, s.slots_total) for s in engines.values()), default=0.0),
            cached=_share(_grown(oldest.cache, now.cache).values()),
            epoch=None if reading.mesh is None else reading.mesh.epoch,
        )
        self.points.append(point)
        return point

    def since(self, t: float) -> list[list[float | None]]:
        """Points after a Unix time, in the order of COLUMNS."""
        newer = sum(1 for point in self.points if point.t > t)
        tail = islice(self.points, len(self.points) - newer, None)
        return [[getattr(point, name) for name in COLUMNS] for point in tail]


def _grown(
    before: Mapping[str, tuple[float, float]], now: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Growth of pairs of counters. One that went back belongs to a new process; one that is new
    may have grown for hours elsewhere and does not count yet."""
    found = {}
    for name, (a, b) in now.items():
        first, second = before.get(name, (a, b))
        found[name] = (a - first, b - second) if a >= first and b >= second else (a, b)
    return found


def _share(grown: Iterable[tuple[float, float]]) -> float | None:
    """Of all first numbers together, the second ones."""
    pairs = list(grown)
    whole = sum(whole for whole, _ in pairs)
    return round(sum(part for _, part in pairs) / whole, 4) if whole else None


def _since(before: Histogram, now: Histogram) -> Histogram:
    counts = [after - earlier for earlier, after in zip(before.counts, now.counts, strict=True)]
    return Histogram(now.bounds, counts, now.total - before.total)


def quantile(histogram: Histogram, q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; None when nothing was observed."""
    total = sum(histogram.counts)
    if not total:
        return None
    wanted, below, low = q * total, 0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        if below + count >= wanted:
            return round(low + (bound - low) * (wanted - below) / count, 5) if count else bound
        below, low = below + count, bound
    return low


def _used(free: int, total: int) -> float:
    return round(1 - free / total, 4) if total else 0.0
