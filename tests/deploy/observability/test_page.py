"""/dashboard and its data: self-contained, bounded, cheap, and careful with what it tells."""

import re
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import httpx
import pytest

from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.state.stats import CacheStats, StoreStats, TierStats
from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.observability import page
from expertmesh.deploy.observability.events import MOST_EVENTS, Events
from expertmesh.deploy.observability.tiers import tiers_of
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.fake_control import FakeControl
from tests.support.http_server import http_server
from tests.support.server_process import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 0.02)


@contextmanager
def serving(mesh: FakeControl | None, edge: EdgeSettings | None = None) -> Iterator[Door]:
    front = Front(FakeEngineClient(), ServedModel("tiny", "/m", 1000, 320, None), edge)
    with http_server(build_app(front, admin=Admin(mesh))) as url, Door(url) as door:
        yield door


def data(door: Door, **query: Any) -> dict[str, Any]:
    answer = door.http.get("/dashboard/data", params=query)
    assert answer.status_code == 200, answer.text
    assert answer.headers["cache-control"] == "no-store"
    found: dict[str, Any] = answer.json()
    return found


def test_the_page_carries_all_it_needs_and_may_load_nothing_else() -> None:
    with serving(None) as door:
        answer = door.http.get("/dashboard")
    text, policy = answer.text, answer.headers["content-security-policy"]
    assert answer.headers["content-type"].startswith("text/html")
    assert "/*css*/" not in text and "/*js*/" not in text
    assert not re.search(r"(?:src|href)\s*=\s*\"(?!data:)", text), "an outside asset"
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("style", "script"):
        (body,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = b64encode(sha256(body.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "innerHTML" not in text and " style=" not in text and " onclick=" not in text
    assert len(text) < 100_000


def test_the_page_is_labelled_for_those_who_do_not_see_it() -> None:
    text = page.assemble()[0].decode()
    assert '<html lang="en">' in text
    for canvas in re.findall(r"<canvas ([^>]*)>", text):
        assert 'role="img"' in canvas
        for name in re.findall(r'aria-(?:labelledby|describedby)="([^"]*)"', canvas):
            assert f'id="{name}"' in text
    for name in re.findall(r'aria-labelledby="([^"]*)"', text):
        assert f'id="{name}"' in text


def test_one_process_has_no_mesh_and_says_so() -> None:
    with serving(None) as door:
        found = data(door)
    assert found["has_mesh"] is False and found["mesh"] is None and found["heat"] is None
    assert found["model"] == "tiny" and found["ready"] and found["points"]
    assert [one["kind"] for one in found["engines"][0]["hot"]] == ["pages", "slots", "snapshots"]
    assert [one["tier"] for one in found["engines"][0]["tiers"]] == ["hot", "hot"]


def test_tiers_are_listed_from_the_device_down() -> None:
    host = TierStats(capacity_bytes=1000, page_bytes=300, snapshot_bytes=20)
    disk = TierStats(capacity_bytes=9000, other_bytes=5, read_only="full")
    cache = CacheStats(snapshots=3, snapshots_total=16, store=StoreStats(host=host, disk=disk))
    stats = EngineStats(
        pages_total=8, pages_free=2, slots_total=4, slots_free=3, page_bytes=10, slot_bytes=100,
        cache=cache,
    )  # fmt: skip
    found = [(t["tier"], t["kind"], t["used"], t["total"]) for t in tiers_of(stats)]
    assert found == [
        ("hot", "pages", 60, 80), ("hot", "slots", 100, 400), ("hot", "snapshots", 300, 1600),
        ("host", "pages", 300, 1000), ("host", "snapshots", 20, 1000),
        ("disk", "pages", 0, 9000), ("disk", "sessions", 5, 9000),
    ]  # fmt: skip
    assert [t["kind"] for t in tiers_of(stats) if t.get("closed")] == ["pages", "sessions"]
    assert {t["tier"] for t in tiers_of(stats) if t.get("shared")} == {"disk"}


def test_a_mesh_is_shown_with_load_members_and_events() -> None:
    mesh = FakeControl(layers=3, experts=8, actors=2)
    mesh.step = 1
    with serving(mesh) as door:
        found = data(door)
        assert found["mesh"]["epoch"] == 3 and found["mesh"]["fan_out"] == 1.25
        assert [row["seat"] for row in found["members"]["experts"]] == ["expert-0", "expert-1"]
        assert found["members"]["experts"][0]["pid"] == 4100
        heat = found["heat"]
        assert [layer["layer"] for layer in heat["layers"]] == [1, 2, 3]
        for layer in heat["layers"]:
            assert len(layer["ranks"]) == 2 and len(layer["spread"]) == 8
            assert sum(layer["ranks"]) == pytest.approx(2, abs=0.02), "relative to an even share"
            assert layer["spread"] == sorted(layer["spread"], reverse=True)
        mesh.epoch += 1
        wait_for(lambda: data(door)["events"] != [], 5)
        lines = [event["text"] for event in data(door)["events"]]
        assert "epoch 4 began" in lines and any("lost m-expert-0.3" in line for line in lines)
        assert data(door)["mesh"]["failovers"] == 1


def test_only_what_is_new_is_sent_again() -> None:
    mesh = FakeControl(layers=2, experts=4, actors=2)
    mesh.step = 1
    with serving(mesh) as door:
        first = data(door)
        version = first["heat"]["version"]
        assert data(door, heat=version)["heat"] is None
        newest = first["points"][-1][0]
        assert all(point[0] > newest for point in data(door, since=newest)["points"])
        mesh.step += 1
        wait_for(lambda: data(door, heat=version)["heat"] is not None, 5)
        for odd in ("", "nan", "x", "-1", "1e999"):
            assert isinstance(data(door, since=odd, heat=odd)["points"], list)


def test_the_answer_stays_small_at_92_layers_896_experts_64_actors() -> None:
    mesh = FakeControl(layers=92, experts=896, actors=64, replicas=64)
    mesh.step = 3
    with serving(mesh) as door:
        whole = door.http.get("/dashboard/data")
        assert len(whole.content) < 150_000
        again = door.http.get(
            "/dashboard/data",
            params={"since": time.time(), "heat": whole.json()["heat"]["version"]},
        )
        assert len(again.content) < 40_000
    big = FakeControl(layers=2, experts=1000, actors=1000)
    with serving(big) as door:
        found = data(door)
        assert len(found["members"]["experts"]) == page.MOST_MEMBERS
        assert found["mesh"]["members"]["expert"] == 1000


def test_many_open_pages_ask_the_mesh_no_oftener_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PERIOD_S", 3600.0)
    mesh = FakeControl()
    with serving(mesh) as door:
        for _ in range(50):
            data(door)
        assert mesh.asked == 1


def test_a_silent_keeper_and_one_that_comes_back() -> None:
    mesh = FakeControl()
    mesh.step = 1
    with serving(mesh) as door:
        assert data(door)["mesh"] is not None
        mesh.silent = EngineUnavailable("the keeper is gone")
        wait_for(lambda: data(door)["mesh"] is None, 5)
        assert data(door)["members"] == {"attention": [], "experts": []}
        mesh.silent = None
        wait_for(lambda: data(door)["mesh"] is not None, 5)


def test_strangers_do_not_learn_where_processes_run() -> None:
    """Without keys this host is trusted; whoever came through a proxy is not this host."""
    mesh = FakeControl()
    with serving(mesh) as door:
        answer = door.http.get("/dashboard/data", headers={"x-forwarded-for": "203.0.113.9"})
        assert answer.status_code == 200
        assert "pid" not in answer.text and "node-a" not in answer.text
        assert answer.json()["events"] is None
        assert answer.json()["members"]["experts"][0]["seat"] == "expert-0"


def test_with_keys_the_page_needs_one() -> None:
    hashes = [hash_key("sk-a-key-of-some-length")]
    edge = EdgeSettings.model_validate({"auth": {"key_hashes": hashes}})
    with serving(FakeControl(), edge) as door:
        for path in ("/dashboard", "/dashboard/data"):
            refused = httpx.get(door.url + path)
            assert refused.status_code == 401
            assert "Basic" in refused.headers["www-authenticate"], "a browser asks for a password"
            allowed = httpx.get(door.url + path, auth=("anyone", "sk-a-key-of-some-length"))
            assert allowed.status_code == 200
        assert "node-a" in allowed.text, "a key may see the members"


def test_events_are_bounded_and_newest_first() -> None:
    events, status = Events(), _status(0)
    events.add(status)
    assert events.newest_first() == []
    for number in range(1, 3 * MOST_EVENTS):
        events.add(_status(number))
    found = events.newest_first()
    assert len(found) == MOST_EVENTS and found[0]["text"] == f"epoch {3 * MOST_EVENTS - 1} began"


def _status(epoch: int) -> dict[str, Any]:
    return {
        "state": "ready", "reason": "", "epoch": epoch, "attention": [], "experts": [],
        "desired": {"attention": 1, "experts": 1}, "losses": 0, "failovers": 0, "failed_joins": 0,
        "moved_experts": 0, "rebalances": 0, "failed_rebalances": 0, "last_rebalance_error": "",
    }  # fmt: skip
