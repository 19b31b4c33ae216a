"""/metrics: lint-clean in both formats, one reading for many scrapes, honest about silence."""

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.cluster import metrics
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.fake_control import FakeControl
from tests.support.http_server import http_server
from tests.support.promtool import check_metrics

OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0,text/plain;q=0.5"}


class SlowClient(FakeEngineClient):
    """Takes a while for its statistics, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(vocab_size=320)
        self.asked = self.at_once = self.most = 0
        self.slow_s = 0.0
        self.counters.page_bytes, self.counters.slot_bytes = 100, 1000
        self.counters.cache.store.disk.capacity_bytes = 1000

    async def stats(self) -> Mapping[str, EngineStats | None]:  # type: ignore[override]
        self.asked += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(self.slow_s)
        self.at_once -= 1
        return {"attention-0": self.counters, "attention-1": None}


@contextmanager
def serving(client: SlowClient, mesh: FakeControl | None) -> Iterator[tuple[Door, Front]]:
    front = Front(client, ServedModel("tiny", "/m", 1000, 320, None))
    with http_server(build_app(front, admin=Admin(mesh))) as url, Door(url) as door:
        yield door, front


def everything(front: Front) -> None:
    """What only some servers have, and one observation of each histogram of the door."""
    front.telemetry.watch_keys(lambda: (3.0, 0.0))
    front.telemetry.watch_placements()
    front.telemetry.grpc_finished("Generate", "OK")
    front.telemetry.first_token(0.1)
    front.telemetry.between_tokens(0.01)
    front.telemetry.admitted(0.0)


@pytest.mark.parametrize("accept", [{}, OPEN_METRICS])
def test_every_metric_is_exposed_and_promtool_has_nothing_to_say(accept: dict[str, str]) -> None:
    mesh = FakeControl()
    mesh.step = 2
    with serving(SlowClient(), mesh) as (door, front):
        everything(front)
        answer = door.http.get("/metrics", headers=accept)
        plain = door.http.get("/metrics").content
    assert check_metrics(plain) == ""
    text = answer.text
    absent = {metrics.LAST_REBALANCE.full_name}  # no rebalance in this mesh
    for metric in metrics.ALL:
        found = all(re.search(rf"^{name}[{{ ]", text, re.MULTILINE) for name in metric.exposed)
        assert found or metric.full_name in absent, metric.full_name
    assert "_created" not in text and "nan" not in text.lower().replace("name", "")
    if accept:
        assert answer.headers["content-type"].startswith("application/openmetrics-text")
        assert len(list(parse_open_metrics(text))) > len(metrics.ALL)
    else:
        assert answer.headers["content-type"].startswith("text/plain")


def test_many_scrapes_at_once_share_readings() -> None:
    """100 scrapes while one reading takes 0.2 s: two readings answer them all."""
    client, mesh = SlowClient(), FakeControl()
    client.slow_s = 0.2
    with serving(client, mesh) as (door, _):

        async def flood() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(base_url=door.url, timeout=30, limits=limits) as many:
                return await asyncio.gather(*[many.get("/metrics") for _ in range(100)])

        answers = asyncio.run(flood())
        assert {answer.status_code for answer in answers} == {200}
        assert client.most == 1 and client.asked < 20
        assert mesh.asked == client.asked


def test_a_scrape_never_shows_less_than_what_was_counted_before_it() -> None:
    with serving(SlowClient(), None) as (door, front):
        for number in range(1, 20):
            front.telemetry.cancelled()
            assert door.metric("expertmesh_request_failures_total") == number


def test_what_is_silent_is_absent_and_what_is_down_is_seen() -> None:
    mesh = FakeControl()
    mesh.down = {"expert-2"}
    with serving(SlowClient(), mesh) as (door, _):
        text = door.http.get("/metrics").text
        assert 'expertmesh_engine_up{engine="attention-1",model_name="tiny"} 0.0' in text
        assert 'expertmesh_num_requests_running{engine="attention-1"' not in text
        assert 'expertmesh_expert_up{model_name="tiny",seat="expert-2"} 0.0' in text
        mesh.silent = EngineUnavailable("the keeper is gone")
        text = door.http.get("/metrics").text
        assert "expertmesh_expert_up{" not in text and "expertmesh_engine_up{" in text
