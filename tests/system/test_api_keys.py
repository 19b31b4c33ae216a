"""A real server with keys: who gets in, a file that changes under it, and that no key shows."""

import os
from pathlib import Path

import httpx
import pytest

from expertmesh.deploy.auth.keys import file_line, hash_key
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process, wait_for

# Of the file, before and after; of the environment; of nobody.
FIRST, SECOND = "em-canary-first-1f6a", "em-canary-second-2f6a"
ENVIRONMENT, WRONG = "em-canary-environment-3f6a", "em-canary-wrong-4f6a"


def status(url: str, key: str | None, path: str = "/v1/models") -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(url + path, headers=headers, timeout=30).status_code


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").replace(path)


def test_keys_of_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text(file_line("team", hash_key(FIRST)))
    monkeypatch.setenv("EXPERTMESH_API_KEYS", ENVIRONMENT)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ["--expert-actors", "0", "--port", str(port), "--api-keys", str(path)]
    with server_process(*flags) as server:
        server.wait_ready(url, 60)
        seen = [str(server.descendants())]
        for key in (None, WRONG, SECOND):
            assert status(url, key) == 401
        for key in (FIRST, ENVIRONMENT):
            assert status(url, key) == 200
            body = {"model": "nano", "prompt": "Hello", "max_tokens": 2}
            headers = {"authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200
        seen.append(httpx.get(url, headers={"authorization": f"Bearer {WRONG}"}).text)

        replace(path, file_line("team", hash_key(SECOND)))
        wait_for(lambda: status(url, SECOND) == 200, 10)
        assert status(url, FIRST) == 401 and status(url, ENVIRONMENT) == 200

        replace(path, f"- {{name: team, hash: {FIRST}}}")  # the key where its hash belongs
        wait_for(lambda: metric(url, "expertmesh_auth_keys_file_failed") == 1, 10)
        assert status(url, SECOND) == 200 and status(url, FIRST) == 401
        assert status(url, None, "/ready") == 200 and status(url, None, "/health") == 200
        wait_for(lambda: "the keys that were valid before stay valid" in server.output, 10)

        replace(path, file_line("team", hash_key(FIRST)))
        wait_for(lambda: status(url, FIRST) == 200, 10)
        assert metric(url, "expertmesh_auth_keys_file_failed") == 0
        for path_of_operators in ("/metrics", "/mesh", "/dashboard", "/openapi.json"):
            headers = {"authorization": f"Bearer {FIRST}"}
            seen.append(httpx.get(url + path_of_operators, headers=headers).text)
        seen.append(server.output)
        assert "canary" not in "".join(seen)
        assert "canary" not in children_know(server)


def metric(url: str, name: str) -> float:
    headers = {"authorization": f"Bearer {ENVIRONMENT}"}
    lines = httpx.get(f"{url}/metrics", headers=headers, timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def children_know(server: ServerProcess) -> str:
    """What the environments of the processes that it started say."""
    environments = [
        Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
        for pid in server.descendants()
        if pid != server.process.pid and os.path.exists(f"/proc/{pid}/environ")
    ]
    return "".join(environments)
