"""`expertmesh cost load` and `session` against real servers, good and bad ones."""

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from expertmesh.deploy.cli import app
from expertmesh.deploy.cost import load, server
from expertmesh.deploy.cost.load import Plan
from expertmesh.deploy.exit_codes import ExitCode, Refused
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.http_server import free_port


@contextmanager
def canned(*chunks: bytes, status: str = "200 OK") -> Iterator[str]:
    """A server that answers everything with these bytes and hangs up."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            while (line := self.rfile.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            self.wfile.write(f"HTTP/1.1 {status}\r\nconnection: close\r\n\r\n".encode())
            for chunk in chunks:
                self.wfile.write(chunk)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}"
        finally:
            listening.shutdown()


def plan(url: str, **changes: Any) -> Plan:
    return replace(Plan(url, "tiny", 1, 1, 4, ["hello"], 10.0), **changes)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "a", "finish_reason": None}])
LAST = event(choices=[{"text": "", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4})
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("chunks", "failure"),
    [
        ((TOKEN, LAST, USAGE, DONE), ""),
        ((b": keep-alive\n\n", TOKEN, b"\n", LAST, DONE), ""),
        ((TOKEN,), "stream cut"),
        ((), "stream cut"),
        ((TOKEN, DONE), "no finish_reason"),
        ((DONE,), "no finish_reason"),
        ((TOKEN, LAST, USAGE), "no [DONE]"),
        ((TOKEN, event(error={"message": "lost"}), DONE), "error in the stream"),
        ((b"data: [1]\n\n",), "error in the stream"),
        ((b"data: {\n\n",), "not an event stream"),
        ((event(choices=[1]),), "not an event stream"),
        ((event(choices=[], usage={"prompt": 3}),), "not an event stream"),
        ((event(choices=[], usage={"prompt_tokens": None}),), "not an event stream"),
    ],
)
def test_only_a_stream_with_its_ends_is_complete(chunks: tuple[bytes, ...], failure: str) -> None:
    with canned(*chunks) as url:
        answer = load.ask(plan(url), 0)
    assert answer.failure == failure
    if USAGE in chunks and not failure:
        assert answer.tokens == (3, 4) and answer.first_token_s is not None


def test_refusals_and_absence_are_reasons_too() -> None:
    with canned(b"{}", status="429 Too Many Requests") as url:
        assert load.ask(plan(url), 0).failure == "HTTP 429"
    assert load.ask(plan(f"http://127.0.0.1:{free_port()}"), 0).failure == "connection lost"
    with socketserver.TCPServer(("127.0.0.1", 0), socketserver.BaseRequestHandler) as silent:
        url = f"http://127.0.0.1:{silent.server_address[1]}"
        assert load.ask(plan(url, timeout_s=0.05), 0).failure == "timeout"


def run(url: str, ledger: Path, *arguments: object) -> dict[str, Any]:
    common = ["--url", url, "--ledger", str(ledger), "--json"]
    done = CliRunner().invoke(app, ["cost", *map(str, arguments), *common])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    record: dict[str, Any] = json.loads(done.stdout)
    return record | {"exit_code": done.exit_code}


PRICED = ("--gpus", "2", "--price-per-gpu-hour", "3.60", "--currency", "EUR")


def test_a_load_is_counted_as_the_server_counts_it(
    fake: FakeEngineClient, door: Door, tmp_path: Path
) -> None:
    before = door.metric("expertmesh_generation_tokens_total")
    found = run(
        door.url, tmp_path, "load", "--requests", 12, "--concurrency", 3, "--max-tokens", 5, *PRICED
    )
    assert found["exit_code"] == 0 and found["completed"] == found["requests"] == 12
    assert found["generated_tokens"] == 60 and found["no_usage"] == 0
    assert door.metric("expertmesh_generation_tokens_total") - before == 60
    assert found["model"] == "tiny" and found["first_token_p99_s"] >= found["first_token_median_s"]
    # The server runs in this process, which is what listens on its port.
    assert found["memory_of"] == "processes"
    assert found["memory_bytes"] >= psutil.Process(os.getpid()).memory_info().rss * 0.5
    # Two GPUs at 3.60 an hour are 0.002 a second.
    assert float(found["summary"]["cost"]) == pytest.approx(0.002 * found["seconds"], rel=1e-6)
    assert len(fake.requests) == 12


def test_failures_are_recorded_and_have_an_exit_code(
    fake: FakeEngineClient, door: Door, tmp_path: Path
) -> None:
    fake.fail_after = 2
    found = run(door.url, tmp_path, "load", "--requests", 3, "--max-tokens", 5)
    assert found["exit_code"] == ExitCode.FAILED
    assert found["failures"] == {"error in the stream": 3} and found["completed"] == 0
    assert found["generated_tokens"] == 0 and found["summary"]["cost"] is None
    fake.fail_after = None
    assert run(door.url, tmp_path, "load", "--requests", 1)["exit_code"] == 0
    told = CliRunner().invoke(app, ["cost", "report", "--ledger", str(tmp_path)])
    assert told.exit_code == 0 and "25.00% (1 of 4)" in told.stdout


def test_prompts_come_from_a_file_in_turn(
    fake: FakeEngineClient, door: Door, tmp_path: Path
) -> None:
    (prompts := tmp_path / "prompts").write_text("first\n\nsecond prompt\n")
    arguments = ("--requests", 4, "--concurrency", 1, "--max-tokens", 1, "--prompts", prompts)
    run(door.url, tmp_path, "load", *arguments)
    first, second, *again = [one.prompt_ids for one in fake.requests]
    assert again == [first, second] and len(first) == 5 < len(second)
    prompts.write_text("\n")
    done = CliRunner().invoke(app, ["cost", "load", "--prompts", str(prompts)])
    assert done.exit_code == ExitCode.USAGE


def test_a_session_counts_from_the_servers_start(
    fake: FakeEngineClient, door: Door, tmp_path: Path
) -> None:
    first = run(door.url, tmp_path, "session", *PRICED)
    door.complete("one more", max_tokens=7)
    second = run(door.url, tmp_path, "session", *PRICED)
    assert second["session"] == first["session"] and second["seconds"] > first["seconds"]
    assert second["generated_tokens"] - first["generated_tokens"] == 7
    assert second["completed"] - first["completed"] == 1
    done = CliRunner().invoke(app, ["cost", "report", "--ledger", str(tmp_path), "--json"])
    (line,) = json.loads(done.stdout)["ledgers"]
    # The later record stands for the earlier one; they are not added.
    assert line["records"] == 1 and line["generated_tokens"] == second["generated_tokens"]
    assert line["cost"] == second["summary"]["cost"]


def test_a_key_is_sent_and_named_in_the_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(server.KEY, " secret ")
    assert server.headers() == {"authorization": "Bearer secret"}
    with (
        canned(b"{}", status="401 Unauthorized") as url,
        pytest.raises(Refused, match="401") as refused,
    ):
        server.fetch(url, "/v1/models")
    assert server.KEY in refused.value.hint and "secret" not in str(refused.value)


def test_strangers_are_told_from_servers(tmp_path: Path) -> None:
    def code(*arguments: str) -> int:
        command = ["cost", *arguments, "--ledger", str(tmp_path)]
        return CliRunner().invoke(app, command).exit_code

    with canned(b"<html></html>") as url:
        assert code("load", "--url", url) == ExitCode.UNREACHABLE
        assert code("session", "--url", url) == ExitCode.UNREACHABLE
    nobody = f"http://127.0.0.1:{free_port()}"
    assert code("load", "--url", nobody) == ExitCode.UNREACHABLE
    assert code("session", "--url", "no url") == ExitCode.USAGE
    assert code("load", "--gpus", "many") == ExitCode.USAGE
    assert code("load", "--price-per-gpu-hour", "2") == ExitCode.USAGE
    assert code("load", "--price-per-gpu-hour", "-2", "--currency", "EUR") == ExitCode.USAGE
    assert code("load", "--price-per-gpu-hour", "2", "--currency", "euro") == ExitCode.USAGE
    assert list(tmp_path.iterdir()) == []
