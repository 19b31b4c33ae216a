"""The real command: starts, answers, refuses with its own exit codes, and leaves nothing."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
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
from tests.support.door import Door, chat_joined, joined
from tests.support.http_server import free_port, http_server
from tests.support.server_process import ServerProcess, server_process, wait_for

# Generous where a busy machine only makes things slow; tight where a hang would hide.
START, STOP, REFUSE = 240.0, 60.0, 90.0
RUNNING = "expertmesh_num_requests_running"
PROMPTS: list[Any] = ["hello world", "a", [1, 2, 3, 4, 5], "Once upon a time " * 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # 7 experts over 2 actors: an uneven placement.
    return write_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny",
        tokenizer=True,
        num_hidden_layers=4,
        num_experts=7,
    )


def answers(door: Door) -> list[Any]:
    """Greedy answers to compare servers by; log-probabilities would show a last-bit difference."""
    found: list[Any] = []
    for prompt in PROMPTS:
        choice = door.complete(
            prompt, max_tokens=10, temperature=0, logprobs=2, ignore_eos=True, return_token_ids=True
        )["choices"][0]
        found.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    found.append(door.chat("hello", **body)["choices"][0]["message"])
    return found


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[Any]:
    """What the same weights say in this process, without Ray."""
    server = start_local(LoadSettings(model=checkpoint), EngineSettings(pages=64, slots=4))
    try:
        info = describe(checkpoint, server.config)
        with http_server(build_app(Front(server.client, info))) as url, Door(url) as door:
            return answers(door)
    finally:
        server.stop()


class TestOneProcess:
    """--expert-actors 0: no Ray at all."""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_serves_and_stops(
        self, checkpoint: Path, expected: list[Any], number: signal.Signals
    ) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with server_process(checkpoint, "--expert-actors", "0", "--port", str(port)) as server:
            server.wait_ready(url, START)
            assert len(server.descendants()) == 1
            with Door(url) as door:
                assert answers(door) == expected
            server.signal(number)
            assert server.wait(STOP) == 0
            assert server.descendants() == {}
            assert "stopped" in server.output

    def test_a_running_answer_gets_its_grace(self, checkpoint: Path) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with server_process(
            checkpoint, "--expert-actors", "0", "--port", str(port), "--grace-seconds", "30"
        ) as server:
            server.wait_ready(url, START)
            result: list[Any] = []
            thread = threading.Thread(target=lambda: result.append(_long_stream(url, 200)))
            thread.start()
            wait_for(lambda: _running(url) > 0, 20)
            server.signal(signal.SIGTERM)
            thread.join(60)
            assert len(result) == 1 and "error" not in result[0][-1]
            assert server.wait(STOP) == 0

    def test_an_answer_cut_by_the_stop_says_so(self, checkpoint: Path) -> None:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with server_process(
            checkpoint, "--expert-actors", "0", "--port", str(port), "--grace-seconds", "1"
        ) as server:
            server.wait_ready(url, START)
            result: list[Any] = []
            thread = threading.Thread(target=lambda: result.append(_long_stream(url, 4000)))
            thread.start()
            wait_for(lambda: _running(url) > 0, 20)
            server.signal(signal.SIGTERM)
            thread.join(60)
            assert "stopping" in result[0][-1]["error"]["message"]
            assert server.wait(STOP) == 0

    def test_port_taken(self, checkpoint: Path) -> None:
        with socket.socket() as owner:
            owner.bind(("127.0.0.1", 0))
            owner.listen()
            port = owner.getsockname()[1]
            code, output = _run(checkpoint, "--port", str(port))
        assert code == 5
        assert f"port {port}" in output and str(os.getpid()) in output and "--port" in output


class TestRefusals:
    """Each way a start can not work: its own code, a message that names the thing, no traceback."""

    def check(self, code: int, *arguments: str | Path, names: str) -> None:
        found, output = _run(*arguments)
        assert found == code, output
        assert names in output and "Traceback" not in output
        assert len(output.splitlines()) < 20

    def test_missing_folder(self, tmp_path: Path) -> None:
        self.check(3, tmp_path / "nothing", names="nothing")
        self.check(3, tmp_path, names="config.json")

    def test_broken_checkpoint(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "broken", shards=2, num_hidden_layers=2)
        shard = sorted(folder.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-7])
        self.check(4, folder, "--dry-run", names=shard.name)
        (folder / "config.json").write_text("{}")
        self.check(4, folder, names="config.json")

    @pytest.mark.parametrize("actors", ["0", "1"])
    def test_damage_that_only_reading_finds(self, tmp_path: Path, actors: str) -> None:
        folder = write_checkpoint(tmp_path / "damaged", shards=1, num_hidden_layers=2)
        name = _damage_a_scale(folder / "model.safetensors")
        port = str(free_port())
        self.check(4, folder, "--expert-actors", actors, "--port", port, names=name)

    def test_not_enough_memory(self, checkpoint: Path) -> None:
        self.check(6, checkpoint, "--kv-pages", str(10**9), names="--kv-pages")

    def test_wrong_usage(self, checkpoint: Path) -> None:
        self.check(2, checkpoint, "--dtype", "float8", names="--dtype")
        self.check(2, checkpoint, "--banana", names="--banana")
        self.check(2, checkpoint, "--expert-actors", "8", "--dry-run", names="1 to 7")

    def test_no_such_cluster(self, checkpoint: Path) -> None:
        port = free_port()
        self.check(
            7, checkpoint, "--address", f"127.0.0.1:{port}", "--port", str(free_port()),
            names=f"127.0.0.1:{port}",
        )  # fmt: skip

    def test_dry_run_starts_nothing(self, checkpoint: Path) -> None:
        port = str(free_port())  # a dry run checks it too
        code, output = _run(checkpoint, "--dry-run", "--attention-replicas", "3", "--port", port)
        assert code == 0 and "3 attention + 2 expert actors" in output and "7 experts" in output
        assert "float32 on cpu" in output and "of torch" in output


def test_help_is_quick() -> None:
    """Measured in CPU seconds, as the machine may be busy."""
    script = (
        "import resource, subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'expertmesh', 'serve', '--help'], check=True,\n"
        "               stdout=subprocess.DEVNULL)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert float(done.stdout) < 1.0, done.stderr


@pytest.fixture(scope="module")
def mesh(checkpoint: Path) -> Iterator[tuple[ServerProcess, str]]:
    """One attention and two expert actors behind Ray Serve."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server_process(checkpoint, "--port", str(port), "--name", "cli-test") as server:
        server.wait_ready(url, START)
        yield server, url


@pytest.mark.timeout(500)
class TestMesh:
    """One server for all of these, in this order: the last ones break it on purpose."""

    def test_same_answers_as_one_process(
        self, mesh: tuple[ServerProcess, str], expected: list[Any]
    ) -> None:
        with Door(mesh[1]) as door:
            assert answers(door) == expected

    def test_streams(self, mesh: tuple[ServerProcess, str], expected: list[Any]) -> None:
        with Door(mesh[1]) as door:
            body = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
            for prompt in PROMPTS:
                events = door.events("/v1/completions", prompt=prompt, **body)
                assert joined(events) == door.text(prompt, **body)
            chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
            events = door.events("/v1/chat/completions", max_tokens=8, ignore_eos=True, **chat)
            assert chat_joined(events) == (expected[-1]["content"] or "")

    def test_refusals_come_from_the_engine_too(self, mesh: tuple[ServerProcess, str]) -> None:
        with Door(mesh[1]) as door:
            assert door.refused("/v1/completions", prompt=[5000])["param"] == "prompt"
            assert door.http.get("/v1/models").json()["data"][0]["id"] == "tiny"

    def test_disconnect_reaches_the_engine(self, mesh: tuple[ServerProcess, str]) -> None:
        """Told by what it generated, which no scrape can miss; it may be idle again before one
        sees it run."""
        names, tokens = (RUNNING, "expertmesh_engine_generation_tokens_total"), 3000
        body = {"model": "tiny", "prompt": "x", "max_tokens": tokens, "ignore_eos": True,
                "stream": True}  # fmt: skip

        def idle_after(before: float) -> float:
            """Tokens generated, once there are more than `before` and nothing runs."""
            found: list[float] = []

            def idle() -> bool:
                found[:] = _samples(mesh[1], *names)
                return len(found) == 2 and found[0] == 0 and found[1] > before

            wait_for(idle, 60, lambda: str(found))
            return found[1]

        before = idle_after(-1)
        with httpx.stream("POST", f"{mesh[1]}/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            next(response.iter_bytes())
        assert idle_after(before) - before < tokens

    def test_same_port_twice(self, mesh: tuple[ServerProcess, str], checkpoint: Path) -> None:
        port = mesh[1].rsplit(":", 1)[1]
        code, output = _run(checkpoint, "--port", port)
        assert code == 5 and f"port {port}" in output

    def test_a_dead_expert_is_told_and_nobody_waits_long(
        self, mesh: tuple[ServerProcess, str]
    ) -> None:
        server, url = mesh
        result: list[Any] = []
        thread = threading.Thread(target=lambda: result.append(_long_stream(url, 300)))
        thread.start()
        wait_for(lambda: _running(url) > 0, 20)
        victim = httpx.get(f"{url}/mesh", timeout=10).json()["experts"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        thread.join(60)
        assert result and result[0][-1]["choices"][0]["finish_reason"] == "length", result
        assert httpx.get(f"{url}/ready", timeout=5).status_code == 200
        assert f"lost {victim['actor']}" in server.output
        wait_for(lambda: len(httpx.get(f"{url}/mesh", timeout=10).json()["experts"]) == 2, 90)

    def test_sigterm_leaves_no_process(self, mesh: tuple[ServerProcess, str]) -> None:
        server, _ = mesh
        assert len(server.descendants()) > 5
        server.signal(signal.SIGTERM)
        assert server.wait(STOP) == 0, server.output
        assert server.descendants() == {}


@pytest.mark.timeout(500)
def test_stop_during_the_start_leaves_no_process(checkpoint: Path) -> None:
    port = str(free_port())
    with server_process(checkpoint, "--port", port, "--name", "early") as server:
        wait_for(lambda: len(server.descendants()) > 3, START, lambda: server.output)
        # Nobody listens yet, and still the port is not to be had.
        assert _run(checkpoint, "--port", port)[0] == 5
        server.signal(signal.SIGTERM)
        # While Ray connects, its own handler is in place for a moment, and aborts.
        assert server.wait(STOP + 30) in (0, 7, -signal.SIGABRT), server.output
        assert server.descendants() == {}


def _damage_a_scale(shard: Path) -> str:
    """Makes one scale byte of an expert NaN, which no header shows. Returns the tensor's name."""
    raw = bytearray(shard.read_bytes())
    data = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data])
    name: str = next(key for key in header if "experts.0." in key and key.endswith("scale"))
    raw[data + header[name]["data_offsets"][0]] = 255
    shard.write_bytes(raw)
    return name


def _run(*arguments: str | Path) -> tuple[int, str]:
    with server_process(*arguments) as server:
        code = server.wait(REFUSE)
        return code, re.sub(r"\s+", " ", server.output) if code == 5 else server.output


def _long_stream(url: str, tokens: int) -> list[Any]:
    with Door(url) as door:
        return door.events(
            "/v1/completions", prompt="x", max_tokens=tokens, ignore_eos=True, temperature=0
        )


def _running(url: str) -> float:
    return sum(_samples(url, RUNNING))


def _samples(url: str, *names: str) -> list[float]:
    """Metrics of the only engine, in one scrape; an engine too busy to answer it is left out."""
    with Door(url) as door:
        lines = door.http.get("/metrics").text.splitlines()
    return [
        float(line.rsplit(" ", 1)[1])
        for name in names
        for line in lines
        if line.startswith(name + "{")
    ]
