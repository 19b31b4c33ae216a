"""Sessions of real servers: saved, killed without warning, and resumed to the last bit."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.bench import state_sessions
from tests.support.checkpoints import write_checkpoint
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process, wait_for

START_S = 240.0
FIRST = [(5 * i + 3) % 200 for i in range(150)]
SECOND = [(7 * i + 1) % 200 for i in range(90)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


class Client:
    """Of one running server."""

    def __init__(self, url: str, process: ServerProcess) -> None:
        self.url, self.process = url, process

    def ask(self, method: str, path: str, status: int = 200, **more: Any) -> dict[str, Any]:
        answer = httpx.request(method, self.url + path, timeout=60, **more)
        assert answer.status_code == status, f"{path}: {answer.status_code} {answer.text}"
        body: dict[str, Any] = answer.json()
        return body

    def post(self, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
        return self.ask("POST", path, status, json=body)

    def turn(self, prompt: list[int], session: str, count: int = 40) -> dict[str, Any]:
        """ids, their log-probabilities and alternatives, and tokens that were not computed."""
        answer = self.post(
            "/v1/completions", model="tiny", prompt=prompt, max_tokens=count, temperature=0,
            ignore_eos=True, return_token_ids=True, logprobs=5, session_id=session,
        )  # fmt: skip
        (choice,) = answer["choices"]
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return {"ids": choice["token_ids"], "logprobs": choice["logprobs"], "cached": cached}

    def engine_metric(self, name: str) -> dict[str, float]:
        """By engine; there is one at least."""
        found = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            if line.startswith(f"expertmesh_{name}{{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.split('engine="')[1].split('"')[0]] = float(value)
        assert found, name
        return found


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """The same to the last bit, and from the session's own state or beyond."""
    assert got["ids"] == wanted["ids"] and got["logprobs"] == wanted["logprobs"]
    assert got["cached"] >= wanted["cached"]


@contextmanager
def serving(model: Path, state: Path, *arguments: str) -> Iterator[Client]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server_process(
        model, "--port", str(port), "--dtype", "float32", "--kv-pages", "64",
        "--host-cache-gb", "0.05", "--state-dir", str(state), "--state-dir-gb", "0.3", *arguments,
    ) as process:  # fmt: skip
        process.wait_ready(url, START_S)
        yield Client(url, process)


@pytest.mark.timeout(300)
def test_a_killed_server_resumes_what_was_suspended(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with serving(model, state, "--expert-actors", "0") as server:
        first = server.turn(FIRST, "s")
        prompt = [*FIRST, *first["ids"], *SECOND]
        server.post("/v1/sessions/s/fork", session_id="uninterrupted")
        wanted = server.turn(prompt, "uninterrupted")
        assert wanted["cached"] == len(FIRST) + 39
        report = server.post("/v1/sessions/s/suspend")
        assert report["tokens"] == len(FIRST) + 40 and report["bytes"] > 0
        server.process.kill_everything()
    with serving(model, state, "--expert-actors", "0") as server:
        names = {card["id"]: card["status"] for card in server.ask("GET", "/v1/sessions")["data"]}
        assert names["s"] == "suspended"
        others = {"x-cache-salt": "another tenant's"}
        assert server.ask("GET", "/v1/sessions", headers=others)["data"] == []
        for method, path in (("GET", ""), ("POST", "/resume"), ("DELETE", "")):
            server.ask(method, f"/v1/sessions/s{path}", 404, headers=others)
        shown = server.ask("GET", "/v1/sessions/s")
        assert set(shown["resident"]) == {"disk"} and shown["missing"] == 0
        resumed = server.post("/v1/sessions/s/resume")
        assert resumed["restored_tokens"] == len(FIRST) + 39 and resumed["recomputed_tokens"] == 0
        assert resumed["tier"] == "disk" and resumed["bytes"] > 0 and resumed["reason"] == ""
        check(server.turn(prompt, "s"), wanted)
        assert server.engine_metric("engine_recomputed_tokens_total") == {"0": 0.0}
        # What is damaged on disk is noticed, said, and computed again.
        server.post("/v1/sessions/s/suspend")
    for file in state.rglob("*.seg"):
        data = bytearray(file.read_bytes())
        data[4096::4096] = bytes(len(data[4096::4096]))
        file.write_bytes(data)
    with serving(model, state, "--expert-actors", "0") as server:
        sessions = [card["id"] for card in server.ask("GET", "/v1/sessions")["data"]]
        if "s" in sessions:
            assert server.post("/v1/sessions/s/resume")["restored_tokens"] == 0
        again = server.turn(prompt, "s")
        assert again["cached"] == 0 and len(again["ids"]) == 40


def test_the_benchmark_kills_and_compares() -> None:
    result = state_sessions.main(["--sessions", "2", "--longest", "1200", "--each", "2"])
    assert (result["sessions"], result["identical"], result["kills"]) == (2, 2, 2)
    assert result["recomputed_tokens"] == result["restored_nothing"] == 0
    assert result["rows_compared"] == 2 * state_sessions.NEXT


@pytest.mark.timeout(400)
def test_another_replica_goes_on_where_the_lost_one_was(model: Path, tmp_path: Path) -> None:
    with serving(
        model, tmp_path / "state", "--attention-replicas", "2", "--expert-actors", "1"
    ) as server:
        first = server.turn(FIRST, "s")
        served = server.engine_metric("engine_prompt_tokens_total")
        (holder,) = [engine for engine, tokens in served.items() if tokens]
        prompt = [*FIRST, *first["ids"], *SECOND]
        server.post("/v1/sessions/s/fork", session_id="uninterrupted")
        wanted = server.turn(prompt, "uninterrupted")
        server.post("/v1/sessions/s/suspend")
        members = server.ask("GET", "/mesh")["attention"]
        (lost,) = [member for member in members if member["seat"] == holder]
        os.kill(lost["pid"], signal.SIGKILL)

        def gone() -> bool:
            present = server.ask("GET", "/mesh")["attention"]
            return lost["pid"] not in [member["pid"] for member in present]

        wait_for(gone, 60, lambda: server.process.output)
        resumed = server.post("/v1/sessions/s/resume")
        assert (resumed["restored_tokens"], resumed["recomputed_tokens"]) == (len(FIRST) + 39, 0)
        assert resumed["tier"] == "disk"
        check(server.turn(prompt, "s"), wanted)
        assert server.ask("DELETE", "/v1/sessions/s")["deleted"]
        server.ask("GET", "/v1/sessions/s", 404)
