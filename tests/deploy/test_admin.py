"""/mesh over HTTP and `expertmesh scale`, against a mesh that is a plain object."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.ledger.stats import MeshStats
from expertmesh.deploy.cli import app as cli
from expertmesh.deploy.engine_client import EngineUnavailable
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import free_port, http_server

TOKEN = "a secret that no log may show"


class FakeControl:
    """Notes what it is asked; `problem` is raised instead of an answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.problem: Exception | None = None

    def _note(self, *asked: Any) -> None:
        self.asked.append(asked)
        if self.problem is not None:
            raise self.problem

    async def status(self) -> dict[str, Any]:
        self._note("status")
        member = {"seat": "attention-0", "actor": "m-attention-0.0", "pid": 7, "host": "here",
                  "leaving": False}  # fmt: skip
        expert = member | {"seat": "expert-0", "experts_per_layer": 4, "leaving": True}
        return {
            "state": "recovering", "reason": "expert-1 has died", "epoch": 3,
            "desired": {"attention": 1, "experts": 2},
            "attention": [member], "experts": [expert],
        }  # fmt: skip

    async def scale(self, experts: Any, attention: Any, dry_run: bool) -> dict[str, Any]:
        self._note("scale", experts, attention, dry_run)
        return {
            "dry_run": dry_run,
            "experts": {"from": 2, "to": 3},
            "attention": {"from": 1, "to": 1},
        }

    async def rebalance(self, dry_run: bool) -> dict[str, Any]:
        self._note("rebalance", dry_run)
        return {"dry_run": dry_run, "moves": 3}

    async def routing_report(self) -> dict[str, Any]:
        self._note("routing")
        return {"layers": {1: {"gini": 0.5}}}

    async def routing_overview(self) -> bytes:
        self._note("overview")
        raise EngineUnavailable("it is not asked for here")

    async def record_routing(self, seconds: float, tokens: int) -> bytes:
        self._note("record", seconds, tokens)
        return b"npz"

    async def stats(self) -> bytes:
        self._note("stats")
        return msgspec.msgpack.encode(MeshStats(epoch=5))


@contextmanager
def serving(mesh: FakeControl | None, token: str | None = None) -> Iterator[Door]:
    served = ServedModel("tiny", "/models/tiny", 8, 8, None)
    app = build_app(Front(FakeEngineClient(), served), admin=Admin(mesh, token))
    with http_server(app) as url, Door(url) as door:
        yield door


@pytest.fixture
def mesh() -> FakeControl:
    return FakeControl()


@pytest.fixture
def door(mesh: FakeControl) -> Iterator[Door]:
    with serving(mesh) as door:
        yield door


ROUTES = [
    ("GET", "/mesh"), ("GET", "/mesh/routing"), ("POST", "/mesh/scale"),
    ("POST", "/mesh/rebalance"), ("POST", "/mesh/routing/record"),
]  # fmt: skip


def test_answers_are_the_meshs_own(door: Door, mesh: FakeControl) -> None:
    assert door.http.get("/mesh").json()["epoch"] == 3
    assert door.http.get("/mesh/routing").json() == {"layers": {"1": {"gini": 0.5}}}
    answer = door.http.post("/mesh/scale", json={"experts": 3})
    assert answer.status_code == 200 and answer.json()["experts"]["to"] == 3
    door.http.post("/mesh/scale", json={"experts": "+1", "attention": "2", "dry_run": True})
    door.http.post("/mesh/scale", json={"attention": "-1", "experts": None})
    assert door.http.post("/mesh/rebalance").json()["moves"] == 3  # no body at all
    door.http.post("/mesh/rebalance", json={"dry_run": True})
    record = door.http.post("/mesh/routing/record", json={"seconds": 2, "tokens": 5})
    assert record.content == b"npz"
    assert record.headers["content-type"] == "application/octet-stream"
    assert mesh.asked[2:] == [
        ("scale", 3, None, False), ("scale", "+1", 2, True), ("scale", None, "-1", False),
        ("rebalance", False), ("rebalance", True), ("record", 2, 5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("scale", {}, "experts"),
        ("scale", {"dry_run": True}, "experts"),
        ("scale", {"experts": "many"}, "experts"),
        ("scale", {"experts": True}, "experts"),
        ("scale", {"experts": 1.5}, "experts"),
        ("scale", {"attention": "++1"}, "attention"),
        ("scale", {"attention": "+99999"}, "attention"),
        ("scale", {"attention": [1]}, "attention"),
        ("scale", {"experts": 1, "dry_run": "yes"}, "dry_run"),
        ("scale", {"expert": 1}, "expert"),
        ("rebalance", {"experts": 1}, "experts"),
        ("routing/record", {"seconds": 0}, "seconds"),
        ("routing/record", {"seconds": 601}, "seconds"),
        ("routing/record", {"tokens": 0}, "tokens"),
        ("routing/record", {"tokens": 1_000_001}, "tokens"),
    ],
)
def test_bad_wishes_name_the_field(
    door: Door, mesh: FakeControl, path: str, body: dict[str, Any], field: str
) -> None:
    error = envelope(door.http.post(f"/mesh/{path}", json=body), 400)
    assert error["param"] == field and field in error["message"]
    assert not mesh.asked


def test_what_the_mesh_refuses_is_told_with_its_field(door: Door, mesh: FakeControl) -> None:
    mesh.problem = ScaleError("experts 99: 16 experts per layer fit 1 to 16 actors", "experts")
    error = envelope(door.http.post("/mesh/scale", json={"experts": 99}), 400)
    assert error["param"] == "experts" and "1 to 16" in error["message"]
    mesh.problem = EngineUnavailable("x-mesh does not answer")
    for method, path in ROUTES:
        body = {"json": {"experts": 1} if path == "/mesh/scale" else {}}
        response = door.http.request(method, path, **(body if method == "POST" else {}))
        assert "does not answer" in envelope(response, 503)["message"]
        assert response.headers["retry-after"] == "1"


def test_a_server_without_a_mesh_says_so() -> None:
    with serving(None) as door:
        for method, path in ROUTES:
            assert "no mesh" in envelope(door.http.request(method, path), 404)["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"host": "evil.example"},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
    ],
)
def test_without_a_token_only_this_host_itself(
    door: Door, mesh: FakeControl, method: str, path: str, headers: dict[str, str]
) -> None:
    response = door.http.request(method, path, headers=headers)
    assert "EXPERTMESH_ADMIN_TOKEN" in envelope(response, 403)["message"]
    assert not mesh.asked


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_with_a_token_nobody_without_it(
    mesh: FakeControl, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    with serving(mesh, TOKEN) as door:
        for given in (None, "", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
            headers = {} if given is None else {"authorization": given}
            response = door.http.request(method, path, headers=headers)
            envelope(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
        assert not mesh.asked
        for scheme in ("Bearer", "bearer"):
            headers = {"authorization": f"{scheme} {TOKEN}", "origin": "http://elsewhere.example"}
            content = b'{"experts": 1}' if path == "/mesh/scale" else b""
            response = door.http.request(method, path, headers=headers, content=content)
            assert response.status_code == 200
        assert door.http.get("/health").status_code == 200  # the other routes ask for nothing
    assert TOKEN not in caplog.text


class TestCommand:
    """`expertmesh scale` against a real socket."""

    def run(self, door: Door | str, *arguments: str) -> tuple[int, str]:
        url = door if isinstance(door, str) else door.url
        result = CliRunner().invoke(cli, ["scale", "--url", url, *arguments])
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.exit_code, result.output

    def test_a_change_is_shown(self, door: Door, mesh: FakeControl) -> None:
        code, output = self.run(door, "--experts", "+1")
        assert code == 0 and "experts" in output and "3" in output and "under way" in output
        code, output = self.run(door, "--attention", "-1", "--experts", "3", "--dry-run", "--json")
        assert code == 0 and json.loads(output)["dry_run"] is True
        assert mesh.asked == [("scale", "+1", None, False), ("scale", 3, "-1", True)]

    def test_without_a_wish_it_shows_what_there_is(self, door: Door) -> None:
        code, output = self.run(door)
        assert code == 0
        for text in ("expert-1 has died", "attention-0", "m-attention-0.0", "leaving", "2 experts"):
            assert text in output
        code, output = self.run(door, "--json")
        assert code == 0 and json.loads(output)["epoch"] == 3

    def test_refusals_name_the_option(self, door: Door, mesh: FakeControl) -> None:
        code, output = self.run(door, "--experts", "many")
        assert code == 2 and "--experts" in output and "number" in output
        mesh.problem = ScaleError("attention 0: at least 1 replica", "attention")
        code, output = self.run(door, "--attention", "0")
        assert code == 2 and "--attention: attention 0: at least 1 replica" in output

    def test_a_token_is_sent(self, mesh: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
        with serving(mesh, TOKEN) as door:
            code, output = self.run(door, "--experts", "1")
            assert code == 8 and "EXPERTMESH_ADMIN_TOKEN" in output
            monkeypatch.setenv("EXPERTMESH_ADMIN_TOKEN", TOKEN)
            code, output = self.run(door, "--experts", "1")
            assert code == 0 and TOKEN not in output

    def test_nobody_there(self) -> None:
        code, output = self.run(f"http://127.0.0.1:{free_port()}")
        assert code == 8 and "no server answers" in output and "Traceback" not in output
        code, output = self.run("nonsense")
        assert code == 2 and "--url nonsense" in output


def test_stats_of_a_silent_keeper_leave_the_rest_of_the_metrics(mesh: FakeControl) -> None:
    with serving(mesh) as door:
        assert "expertmesh_engine_up" in door.http.get("/metrics").text
        mesh.problem = EngineUnavailable("silent")
        response: httpx.Response = door.http.get("/metrics")
        assert response.status_code == 200 and "expertmesh_engine_up" in response.text
