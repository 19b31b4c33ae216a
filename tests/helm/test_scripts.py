"""The scripts that the chart brings along, run for real."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import orjson
import pytest

from tests.helm.chart import CHART, container, pod, render, the
from tests.support.server_process import wait_for

DRAIN, CHAT = CHART / "files" / "drain.sh", CHART / "files" / "chat.py"

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"
CLIENT = "   1: 0A01F40A:1F40 0501F40A:C350 01 00000000:00000000\n"
OTHERS = (
    "   2: 00000000:1F40 00000000:0000 0A 00000000:00000000\n"  # listening
    "   3: 0100007F:1F40 0100007F:C351 01 00000000:00000000\n"  # this pod's own
    "   4: 0A01F40A:1F91 0501F40A:C352 01 00000000:00000000\n"  # another port
    "   5: 0A01F40A:1F40 0501F40A:C353 06 00000000:00000000\n"  # already closed
)
CLIENT6 = (
    "   1: 0000000000000000FFFF00000A01F40A:C383 0000000000000000FFFF00000501F40A:C350 01 0:0\n"
)


def drain(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """Runs the hook on folder/tcp and tcp6. Its pauses are short, and noted in folder/slept."""
    programs = folder / "bin"
    programs.mkdir()
    sleep = programs / "sleep"
    sleep.write_text(f'#!/bin/bash\necho "$1" >> {folder}/slept\nexec /bin/sleep 0.01\n')
    sleep.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "PROC_NET": str(folder)}
    return subprocess.Popen(["/bin/bash", DRAIN, str(folder / "leaving"), *arguments], env=env)


def test_the_scripts_syntax() -> None:
    assert subprocess.run(["/bin/bash", "-n", DRAIN]).returncode == 0


@pytest.mark.parametrize(("file", "line"), [("tcp", CLIENT), ("tcp6", CLIENT6)], ids=["4", "6"])
def test_drain_waits_for_clients_and_only_for_them(tmp_path: Path, file: str, line: str) -> None:
    (tmp_path / file).write_text(HEAD + OTHERS + line)
    process = drain(tmp_path, "15", "3600", "8000", "50051")
    slept = tmp_path / "slept"
    wait_for(lambda: slept.exists() and len(slept.read_text().split()) > 3, 30)
    assert process.poll() is None
    assert slept.read_text().split()[:2] == ["15", "1"]
    assert (tmp_path / "leaving").exists()
    without = tmp_path / "without"
    without.write_text(HEAD + OTHERS)
    without.replace(tmp_path / file)
    assert process.wait(30) == 0


def test_drain_ends_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(HEAD + CLIENT)
    assert drain(tmp_path, "0", "0", "8000").wait(30) == 0


def test_the_hook_names_the_files_and_ports_of_the_pod() -> None:
    objects = render(grpc={"enabled": True})
    first = container(objects, "front-door")
    command = first["lifecycle"]["preStop"]["exec"]["command"]
    ports = {port["name"]: str(port["containerPort"]) for port in first["ports"]}
    assert command == [
        "/bin/bash", "/etc/expertmesh/scripts/drain.sh", "/tmp/expertmesh-leaving",
        "15", "300", ports["serve"], ports["grpc"],
    ]  # fmt: skip
    assert pod(objects, "front-door")["terminationGracePeriodSeconds"] > 15 + 300
    scripts = the(objects, "ConfigMap", "-scripts")["data"]
    assert scripts["drain.sh"].rstrip() == DRAIN.read_text().rstrip()
    assert scripts["chat.py"].rstrip() == CHAT.read_text().rstrip()
    assert "lifecycle" not in container(render(drain={"enabled": False}), "front-door")


class Api(BaseHTTPRequestHandler):
    """Ready or not, and one answer. `seen` holds what was asked with which key."""

    ready: ClassVar[int] = 200
    finish: ClassVar[str] = "stop"
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def answer(self, status: int, body: object) -> None:
        Api.seen.append((self.path, self.headers["authorization"]))
        data = orjson.dumps(body)
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(Api.ready, {"status": "loading"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"finish_reason": Api.finish, "message": {"content": "I am nano."}}
        self.answer(200, {"choices": [choice]})

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[str]:
    Api.ready, Api.finish, Api.seen = 200, "stop", []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def chat(url: str, **env: str) -> "subprocess.CompletedProcess[str]":
    given = {"BASE_URL": url, "MODEL": "nano", "TIMEOUT_SECONDS": "10", "KEYS_NEEDED": ""} | env
    command = [sys.executable, "-S", "-E", CHAT]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=60)


def test_the_chart_test_asks_for_an_answer(api: str) -> None:
    done = chat(api, KEYS_NEEDED="yes", API_KEY="em-k")
    assert (done.returncode, done.stdout) == (0, "ready\nanswer: I am nano.\n")
    assert Api.seen == [("/ready", "Bearer em-k"), ("/v1/chat/completions", "Bearer em-k")]


def test_the_chart_test_without_a_key_asks_only_whether_it_is_ready(api: str) -> None:
    done = chat(api, KEYS_NEEDED="yes")
    assert done.returncode == 0 and "not asked" in done.stdout
    assert [path for path, _ in Api.seen] == ["/ready"]


def test_the_chart_test_fails_with_the_reason(api: str) -> None:
    Api.ready = 503
    assert "HTTP 503" in chat(api).stderr and "loading" in chat(api).stderr
    Api.ready, Api.finish = 200, "abort"
    done = chat(api)
    assert done.returncode == 1 and "abort" in done.stderr
    assert chat("http://127.0.0.1:1").returncode == 1
