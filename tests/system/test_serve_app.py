"""The app as `serve run` and RayService configs use it: behind Serve's proxy, with its own mesh."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.deploy.front import Front
from expertmesh.deploy.one_process import start_local
from expertmesh.deploy.openai.app import build_app
from expertmesh.deploy.openai.describe import describe
from tests.support.checkpoints import write_checkpoint
from tests.support.door import Door, joined
from tests.support.http_server import free_port, http_server
from tests.support.server_process import MARK, marked_processes, wait_for

START = 240.0


@contextmanager
def proxied(model: Path) -> Iterator[tuple[str, str]]:
    """(base URL, mark) of a running application."""
    port, mark = free_port(), os.urandom(8).hex()
    with tempfile.TemporaryFile("w+") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.serve_app_driver", str(model), str(port)],
            cwd=Path(__file__).parents[2],
            env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        url = f"http://127.0.0.1:{port}"

        def output() -> str:
            log.seek(0)
            return log.read()

        def ready() -> bool:
            assert driver.poll() is None, output()
            try:
                return httpx.get(f"{url}/ready", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        try:
            wait_for(ready, START, output)
            yield url, mark
        finally:
            assert driver.stdin is not None
            driver.stdin.close()
            try:
                driver.wait(30)
            finally:
                for pid in marked_processes(mark):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(700)
def test_behind_the_proxy_and_back_after_a_death(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", tokenizer=True, num_hidden_layers=4)
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    grammar = body | {"structured_outputs": {"regex": "([a-c]é)*"}}
    local = start_local(LoadSettings(model=model), EngineSettings(pages=32, slots=4))
    app = build_app(Front(local.client, describe(model, local.config)))
    with http_server(app) as url, Door(url) as door:
        expected = door.text("hello world", **body)
        bound = door.text("hello world", **grammar)
    local.stop()
    with proxied(model) as (url, mark), Door(url) as door:
        assert door.text("hello world", **body) == expected
        events = door.events("/v1/completions", prompt="hello world", **body)
        assert joined(events) == expected
        assert door.text("hello world", **grammar) == bound
        broken = door.refused("/v1/completions", prompt="x", structured_outputs={"regex": "("})
        assert broken["param"] == "structured_outputs.regex"
        assert door.refused("/v1/completions", prompt="x", banana=1)["param"] == "banana"
        assert door.refused("/nope", 404)["code"] == "not_found"
        echoed = door.http.get("/health", headers={"x-request-id": "mine"})
        assert echoed.headers.get_list("x-request-id") == ["mine"]
        (victim,) = [
            pid for pid, line in marked_processes(mark).items() if re.search("ExpertActor", line)
        ]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: door.http.get("/ready").status_code == 503, 10)
        # Serve replaces the keeper, and with it the mesh.
        wait_for(lambda: door.http.get("/ready").status_code == 200, START)
        assert door.text("hello world", **body) == expected
