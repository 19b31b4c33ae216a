"""A front door that is about to leave sends clients elsewhere, but refuses nobody."""

from pathlib import Path

import httpx

from expertmesh.deploy.edge_settings import EdgeSettings, HttpSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import http_server

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4}


def test_drain_file(served: ServedModel, tmp_path: Path) -> None:
    file = tmp_path / "leaving"
    edge = EdgeSettings(http=HttpSettings(drain_file=file))
    app = build_app(Front(FakeEngineClient(), served, edge))
    with http_server(app) as url, httpx.Client(base_url=url) as client:
        assert client.get("/ready").status_code == 200
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200 and "connection" not in answer.headers
        file.touch()
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/completions", json=BODY)
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        file.unlink()
        assert client.get("/ready").status_code == 200
