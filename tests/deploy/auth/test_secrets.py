"""No key in what the server says, logs, shows of itself or sends to other processes."""

import base64
import logging
import pickle
from pathlib import Path

import httpx
import pytest

from expertmesh.deploy.auth.keyring import Keyring, environment_hashes
from expertmesh.deploy.auth.keys import hash_key
from expertmesh.deploy.edge_settings import AuthSettings, EdgeSettings
from expertmesh.deploy.openai.admin import Admin
from expertmesh.deploy.serve_app import DoorSettings
from tests.deploy.auth.conftest import Serve, bearer
from tests.deploy.test_admin import FakeControl
from tests.support.fake_client import FakeEngineClient

RIGHT, WRONG, ADMIN = "em-canary-right", "em-canary-wrong", "em-canary-admin"


def clean(text: str) -> None:
    assert "canary" not in text and base64.b64encode(b"canary").decode()[:6] not in text


def test_nothing_that_a_server_says_or_logs_has_a_key_in_it(
    serve: Serve, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the most talkative, with bugs, refusals and changed keys."""
    caplog.set_level(logging.DEBUG)
    client = FakeEngineClient()
    said: list[httpx.Response] = []
    auth = {"key_hashes": [hash_key(RIGHT)]}
    with serve(Admin(FakeControl(), ADMIN), client, auth=auth) as door:
        for key in (RIGHT, WRONG, ADMIN):
            for headers in (bearer(key), {"authorization": key}, {"x-api-key": key}):
                for path in ("/v1/models", "/mesh", "/metrics", "/nowhere", "/openapi.json"):
                    said.append(door.http.get(path, headers=headers))
                said.append(door.http.post("/mesh/scale", json={"x": 1}, headers=headers))
                said.append(door.http.post("/v1/completions", json={}, headers=headers))
            said.append(door.http.get("/metrics", auth=httpx.BasicAuth("u", key)))
        client.ready = None  # type: ignore[assignment]
        said.append(door.http.post("/v1/completions", json={}, headers=bearer(RIGHT)))
        assert said[-1].status_code == 500
    for response in said:
        clean(response.text)
        clean(str(response.headers))
    logged = [record for record in caplog.records if record.name.split(".")[0] != "httpx"]
    assert any("failed" in record.getMessage() for record in logged)
    clean(caplog.text.replace(f"{door.url}", ""))
    clean("".join(capfd.readouterr()))


def test_what_travels_to_other_processes_has_hashes_only(tmp_path: Path) -> None:
    hashes = environment_hashes({"EXPERTMESH_API_KEYS": f"{RIGHT},{WRONG}"})
    edge = EdgeSettings(auth=AuthSettings().with_hashes(hashes))
    door = DoorSettings(model=tmp_path, mesh="m", namespace="n", edge=edge)
    packed = pickle.dumps(door)
    assert hashes[0].encode() in packed and b"canary" not in packed
    assert hashes[0] not in repr(door), "what logs and dashboards print has not even those"


def test_objects_do_not_show_keys_or_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"- {{name: a, hash: '{hash_key(RIGHT)}'}}")
    keyring = Keyring(AuthSettings(keys_file=path, key_hashes=(hash_key(WRONG),)))
    for thing in (keyring, AuthSettings(key_hashes=(hash_key(WRONG),)), EdgeSettings()):
        clean(repr(thing))
        assert hash_key(RIGHT) not in repr(thing) and hash_key(WRONG) not in repr(thing)
