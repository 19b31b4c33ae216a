"""With keys configured nothing but the probes answers without one, by whatever path."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from fastapi.routing import APIRoute

from expertmesh.deploy.auth.guard import OPEN_PATHS
from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.served import ServedModel
from tests.deploy.auth.conftest import KEY, TOKEN, Serve, bearer
from tests.deploy.test_admin import FakeControl
from tests.support.door import Door, envelope
from tests.support.fake_client import FakeEngineClient
from tests.support.session_answers import answering

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
BASIC = httpx.BasicAuth("anyone", KEY)


@pytest.fixture(scope="module")
def door(serve: Serve) -> Iterator[Door]:
    client = FakeEngineClient()
    client.answer = answering
    with serve(Admin(FakeControl()), client) as door:
        yield door


def routes(served: ServedModel) -> list[tuple[str, str]]:
    """(method, path) of everything that the app has."""
    edge = EdgeSettings.model_validate({"auth": {"key_hashes": [hash_key(KEY)]}})
    app = build_app(Front(FakeEngineClient(), served, edge), admin=Admin(FakeControl()))
    found = []
    for route in app.routes:
        path = getattr(route, "path", "")
        methods = route.methods if isinstance(route, APIRoute) else {"GET"}
        path = path.replace("{model_id:path}", "tiny").replace("{session_id}", "s")
        found += [(method, path) for method in methods]
    assert ("POST", "/v1/chat/completions") in found and len(found) > 12
    return sorted(found)


def denied(response: httpx.Response) -> None:
    assert envelope(response, 401)["type"] == "authentication_error"
    assert response.headers.get_list("www-authenticate")[0] == "Bearer"
    assert response.headers["x-request-id"] and KEY not in response.text


def test_every_route_of_the_app_wants_a_key(door: Door, served: ServedModel) -> None:
    """Also routes that are added later: they are asked of the app itself."""
    for method, path in routes(served):
        if path in OPEN_PATHS:
            assert door.http.request(method, path).status_code == 200
            continue
        for headers in ({}, bearer("em-wrong"), bearer(KEY.upper()), {"authorization": KEY}):
            denied(door.http.request(method, path, headers=headers))
        right = door.http.request(method, path, headers=bearer(KEY))
        assert right.status_code not in (401, 403, 404, 405), f"{method} {path}: {right.text}"


def raw(door: Door, target: str, method: str = "GET", headers: str = "") -> int:
    """The status for a request target as it is written: clients of libraries tidy it up."""
    url = httpx.URL(door.url)
    with socket.create_connection((url.host, url.port or 80), timeout=10) as connection:
        head = f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n"
        connection.sendall(head.encode("latin-1"))
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    return int(answer.split(b" ", 2)[1])


SPELLINGS = [
    "/v1/models/", "//v1/models", "/v1/../v1/models", "/V1/MODELS", "/v1/models?x=1",
    "/v1%2fmodels",
    "/health/", "//health", "/HEALTH", "/health/../v1/models", "/health/v1/models", "/health%2f..",
    "/./health", "/health;x", "/ready/x", "/healthz", "/readyz", "/nowhere", "/", "*",
    "/v1/models#/health", "/%2e%2e/health", "/docs", "/redoc", "/openapi.json", "/invocations",
    "/v1/embeddings", "/dashboardx", "/metricsx", "/meshx", "/metrics/../v1/models",
]  # fmt: skip


@pytest.mark.parametrize("target", SPELLINGS)
def test_no_spelling_of_a_path_gets_around_it(door: Door, target: str) -> None:
    for method in ("GET", "OPTIONS", "HEAD", "POST", "DELETE", "PUT", "PATCH", "TRACE", "FOO"):
        assert raw(door, target, method) in (400, 401), f"{method} {target}"


def test_absolute_targets_and_upgrades_are_no_way_around(door: Door) -> None:
    assert raw(door, "http://x/health") in (200, 400, 401)
    assert raw(door, "http://x/v1/models") in (400, 401)
    upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    upgrade += "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    assert raw(door, "/v1/models", headers=upgrade) in (400, 401, 403)


def test_probes_need_none(door: Door) -> None:
    for path in OPEN_PATHS:
        assert door.http.get(path).status_code == 200
        assert door.http.get(path, headers=bearer("em-wrong")).status_code == 200
        assert door.http.get(path + "?verbose=1").status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "bEaReR "])
def test_the_scheme_may_be_spelled_as_one_likes(door: Door, scheme: str) -> None:
    headers = {"authorization": f"{scheme} {KEY}"}
    assert door.http.get("/v1/models", headers=headers).status_code == 200


def test_browsers_may_send_it_as_a_password_where_they_only_look(door: Door) -> None:
    for path in ("/metrics", "/mesh", "/mesh/routing"):
        challenge = door.http.get(path).headers.get_list("www-authenticate")
        assert challenge == ["Bearer", 'Basic realm="expertmesh"'], "or no browser asks for it"
        assert door.http.get(path, auth=BASIC).status_code == 200
        assert door.http.head(path, auth=BASIC).status_code == 200
        denied(door.http.get(path, auth=httpx.BasicAuth(KEY, "wrong")))
    for method, path in (
        ("POST", "/mesh/scale"), ("POST", "/mesh/rebalance"), ("POST", "/mesh"),
        ("POST", "/metrics"), ("GET", "/v1/models"), ("POST", "/v1/chat/completions"),
        ("GET", "/meshx"),
    ):  # fmt: skip
        response = door.http.request(method, path, auth=BASIC, json=CHAT)
        denied(response)
        assert response.headers.get_list("www-authenticate") == ["Bearer"]


def test_a_key_may_look_at_the_mesh_and_not_change_it_from_elsewhere(serve: Serve) -> None:
    """Another host's name is what a request from another host has in common with a rebound one."""
    elsewhere = {"host": "mesh.example"}
    with serve(Admin(FakeControl())) as door:
        key = bearer(KEY)
        for path in ("/mesh", "/mesh/routing"):
            assert door.http.get(path, headers=key | elsewhere).status_code == 200
        assert door.http.post("/mesh/scale", json={"experts": 1}, headers=key).status_code == 200
        for path in ("/mesh/scale", "/mesh/rebalance", "/mesh/routing/record"):
            response = door.http.post(path, json={}, headers=key | elsewhere)
            assert envelope(response, 403)["message"].startswith("without EXPERTMESH_ADMIN_TOKEN")


def test_with_an_admin_token_only_that_changes_the_mesh(serve: Serve) -> None:
    with serve(Admin(FakeControl(), TOKEN)) as door:
        wish: dict[str, Any] = {"json": {"experts": 1}}
        envelope(door.http.post("/mesh/scale", headers=bearer(KEY), **wish), 403)
        denied(door.http.post("/mesh/scale", **wish))
        assert door.http.post("/mesh/scale", headers=bearer(TOKEN), **wish).status_code == 200
        for path in ("/mesh", "/metrics"):
            assert door.http.get(path, headers=bearer(TOKEN)).status_code == 200
            assert door.http.get(path, headers=bearer(KEY)).status_code == 200
        denied(door.http.get("/v1/models", headers=bearer(TOKEN)))


def test_the_official_client_is_told(door: Door) -> None:
    messages = CHAT["messages"]
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key=KEY, max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)  # type: ignore[call-overload]
        assert answer.usage.completion_tokens == 3
    for stream in (False, True):
        with (
            openai.OpenAI(base_url=f"{door.url}/v1", api_key="em-wrong") as client,
            pytest.raises(openai.AuthenticationError) as raised,
        ):
            client.chat.completions.create(model="tiny", messages=messages, stream=stream)  # type: ignore[call-overload]
        assert raised.value.code == "invalid_api_key"
        assert raised.value.type == "authentication_error"


def test_failures_are_counted_by_reason(serve: Serve) -> None:
    with serve() as door:
        for headers in ({}, bearer("wrong"), bearer("wrong")):
            door.http.get("/v1/models", headers=headers)
        text = door.http.get("/metrics", headers=bearer(KEY)).text
    assert 'auth_failures_total{model_name="tiny",reason="missing"} 1.0' in text
    assert 'auth_failures_total{model_name="tiny",reason="unknown"} 2.0' in text
    assert 'auth_keys{model_name="tiny"} 1.0' in text


def test_without_keys_nobody_is_asked(serve: Serve) -> None:
    with serve(auth={}) as door:
        assert door.http.get("/v1/models").status_code == 200
        assert door.http.get("/v1/models", headers=bearer("anything")).status_code == 200
        assert "auth_failures" not in door.http.get("/metrics").text
