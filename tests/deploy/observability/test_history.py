"""The last minutes, as the page draws them: right rates, bounded, no invented numbers."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.attention.timings import Histogram
from expertmesh.actors.state.stats import CacheStats
from expertmesh.cluster.ledger.stats import ActorLoad, MeshStats
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability.history import COLUMNS, History, quantile
from expertmesh.deploy.observability.scrape import Reading
from expertmesh.deploy.openai.telemetry import Telemetry


@pytest.fixture
def front() -> Any:
    """What History reads of a front door."""
    telemetry = Telemetry("m", lambda: 0.0)
    return SimpleNamespace(
        telemetry=telemetry,
        admission=SimpleNamespace(waiting=3),
        traffic=SimpleNamespace(requests=7),
    )


def reading(at: float, mesh: MeshStats | None = None, **engines: EngineStats | None) -> Reading:
    return Reading(engines, mesh, at)


def engine(generated: int, prompt: int = 0, **fields: Any) -> EngineStats:
    return EngineStats(generation_tokens=generated, prompt_tokens=prompt, **fields)


def test_rates_are_per_second_and_added_up_over_engines(front: Any) -> None:
    history = History(cast(Front, front))
    first = history.add(reading(10.0, a=engine(1_000_000), b=engine(5)))
    assert (first.generated, first.prompt) == (0.0, 0.0), "what was before is no rate"
    front.telemetry.cancelled()
    front.telemetry.cancelled()
    point = history.add(reading(12.0, a=engine(1_000_100, 40, running=2), b=engine(25, running=1)))
    assert (point.generated, point.prompt, point.running) == (60.0, 20.0, 3)
    assert (point.errors, point.others, point.answers) == (0.0, 1.0, 0.0)
    assert (point.queued, point.in_flight) == (3, 7)


def test_the_share_from_the_cache_is_of_tokens_and_of_late(front: Any) -> None:
    history = History(cast(Front, front))

    def cached(queries: int, hits: int) -> EngineStats:
        return engine(0, cache=CacheStats(queries=queries, hits=hits))

    assert history.add(reading(0.0, a=cached(9000, 0), b=cached(500, 500))).cached is None
    new = cached(700, 700)
    point = history.add(reading(2.0, a=cached(9100, 64), b=cached(500, 500), c=new))
    assert point.cached == 0.64, "a new engine's past does not count"
    point = history.add(reading(4.0, a=cached(9100, 64), b=cached(800, 600), c=new))
    assert point.cached == pytest.approx((64 + 100) / (100 + 300))
    for second in range(6, 20, 2):
        point = history.add(reading(float(second), a=cached(9100, 64), b=cached(800, 600)))
    assert point.cached is None


def test_engines_come_go_and_restart(front: Any) -> None:
    history = History(cast(Front, front))
    history.add(reading(0.0, a=engine(500)))
    assert history.add(reading(1.0, a=engine(20), b=engine(9000))).generated == 20.0, "a new a"
    assert history.add(reading(2.0, a=None, b=engine(9010))).generated == 10.0
    assert history.engines["a"] is None
    assert history.add(reading(3.0)).generated == 0.0


def test_latencies_are_of_the_last_samples_only(front: Any) -> None:
    history = History(cast(Front, front))
    front.telemetry.first_token(100.0)  # before anybody watched
    assert history.add(reading(0.0)).ttft50 is None
    for _ in range(100):
        front.telemetry.first_token(0.3)
    point = history.add(reading(2.0))
    assert point.ttft50 is not None and 0.25 <= point.ttft50 <= 0.5
    assert point.itl50 is None
    for second in range(4, 20, 2):
        point = history.add(reading(float(second)))
    assert point.ttft50 is None, "an old observation does not stay"


def test_memory_and_answers_are_bounded(front: Any) -> None:
    history = History(cast(Front, front))
    for second in range(400):
        history.add(reading(float(second)))
    assert len(history.points) == 300
    every = history.since(0.0)
    assert len(every) == 300 and all(len(row) == len(COLUMNS) for row in every)
    newest = history.points[-1].t
    assert history.since(newest) == []


def test_seats_are_shown_as_they_are_now(front: Any) -> None:
    history = History(cast(Front, front))

    def mesh(**rows: int) -> MeshStats:
        return MeshStats(actors=[ActorLoad(seat, n, n / 100) for seat, n in rows.items()])

    history.add(reading(0.0, mesh(e0=100, e1=100)))
    history.add(reading(2.0, mesh(e0=200, e2=50)))
    assert history.seats == {"e0": (50.0, 0.5), "e2": (0.0, 0.0)}


@pytest.mark.parametrize(
    ("counts", "q", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),
        ([0, 4, 0], 0.5, 1.5),
        ([1, 1, 0], 1.0, 2.0),
        ([0, 0, 5], 0.5, 2.0),  # above the last bound: all that is known is that
    ],
)
def test_quantiles_are_those_of_prometheus(
    counts: list[int], q: float, expected: float | None
) -> None:
    assert quantile(Histogram((1.0, 2.0), counts), q) == expected
