"""CORS, with the headers that browsers send and look at."""

from collections.abc import Iterator

import httpx
import pytest
from pydantic import ValidationError

from expertmesh.deploy.edge_settings import HttpSettings
from tests.deploy.auth.conftest import KEY, Serve, bearer
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient

ORIGIN = "https://chat.example"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


@pytest.fixture(scope="module")
def door(serve: Serve) -> Iterator[Door]:
    with serve(http={"cors_origins": [ORIGIN, "http://localhost:3000"]}) as door:
        yield door


def readable(response: httpx.Response, origin: str = ORIGIN) -> httpx.Response:
    """A page of `origin` may read it, and caches keep it apart from other pages' answers."""
    headers = response.headers
    assert headers["access-control-allow-origin"] == origin
    assert "origin" in headers["vary"].lower()
    assert "access-control-allow-credentials" not in headers
    exposed = headers["access-control-expose-headers"].lower()
    assert "x-request-id" in exposed and "retry-after" in exposed
    return response


def test_a_preflight_needs_no_key(door: Door) -> None:
    response = door.http.options("/v1/chat/completions", headers=PREFLIGHT)
    headers = response.headers
    assert response.status_code == 200 and headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in headers["access-control-allow-methods"]
    assert "authorization" in headers["access-control-allow-headers"].lower()
    assert "x-stainless-os" in headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in headers
    assert "origin" in headers["vary"].lower() and int(headers["access-control-max-age"]) > 0


def test_an_options_request_that_is_no_preflight_needs_one(door: Door) -> None:
    assert door.http.options("/v1/models").status_code == 401
    assert door.http.options("/v1/models", headers={"origin": ORIGIN}).status_code == 401


def test_other_origins_and_methods_are_told_no(door: Door) -> None:
    for change in ({"origin": "https://evil.example"}, {"access-control-request-method": "PUT"}):
        response = door.http.options("/v1/chat/completions", headers=PREFLIGHT | change)
        assert response.status_code == 403 and response.json()["error"]["code"] == "forbidden"
    response = door.http.get("/v1/models", headers=bearer(KEY) | {"origin": "https://evil.example"})
    assert response.status_code == 200 and "access-control-allow-origin" not in response.headers
    assert "origin" in response.headers["vary"].lower()


def test_answers_and_errors_can_be_read(door: Door) -> None:
    origin = {"origin": ORIGIN}
    key = bearer(KEY) | origin
    assert readable(door.http.get("/v1/models", headers=key)).status_code == 200
    assert readable(door.http.get("/v1/models", headers=origin)).status_code == 401
    assert readable(door.http.get("/nowhere", headers=key)).status_code == 404
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
    response = readable(door.http.post("/v1/completions", json=body, headers=key))
    assert response.text.endswith("data: [DONE]\n\n")
    assert readable(door.http.post("/v1/completions", json={}, headers=key)).status_code == 400


def test_refusals_for_load_and_bugs_can_be_read_too(serve: Serve) -> None:
    client = FakeEngineClient(lambda request: [65])  # one token, and then it never ends
    queue = {"running": 1, "waiting": 0}
    with serve(client=client, http={"cors_origins": [ORIGIN]}, queue=queue) as door:
        headers = bearer(KEY) | {"origin": ORIGIN}
        body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": 9}
        with door.http.stream("POST", "/v1/completions", json=body, headers=headers) as first:
            chunks = first.iter_bytes()
            next(chunks)
            second = readable(door.http.post("/v1/completions", json=body, headers=headers))
            assert second.status_code == 429 and second.headers["retry-after"]
        client.ready = None  # type: ignore[assignment]
        assert readable(door.http.get("/ready", headers=headers)).status_code == 500


def test_all_origins(serve: Serve) -> None:
    with serve(http={"cors_origins": ["*"]}) as door:
        preflight = door.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in preflight.headers
        readable(door.http.get("/v1/models", headers=bearer(KEY) | {"origin": ORIGIN}), "*")


def test_off_is_off(serve: Serve) -> None:
    with serve() as door:
        response = door.http.get("/v1/models", headers=bearer(KEY) | {"origin": ORIGIN})
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
        assert door.http.options("/v1/models", headers=PREFLIGHT).status_code == 401


@pytest.mark.parametrize("good", ["*", ORIGIN, "http://localhost:3000", "http://[::1]:8080"])
def test_origins_as_browsers_send_them(good: str) -> None:
    assert HttpSettings(cors_origins=(good,)).cors_origins == (good,)


@pytest.mark.parametrize(
    "bad",
    ["", "chat.example", "https://chat.example/", "https://Chat.example", "https://chat.example:443",
     "http://chat.example:80", "https://*.example", "null", "ftp://chat.example", "https://a b"],
)  # fmt: skip
def test_origins_that_would_never_match_are_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="origin such as"):
        HttpSettings(cors_origins=(bad,))
