"""Six seeded faults and a scaling of a real server under 16 streams of the OpenAI client.

`make chaos` does two hundred.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.checkpoints import write_checkpoint
from tests.support.http_server import free_port
from tests.support.server_process import server_process
from tests.support.siege import Siege
from tests.system.chaos import START_S, Chaos


def test_six_faults_cost_no_request_and_change_no_answer() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sizes = ["--expert-actors", "3", "--attention-replicas", "2"]
    with server_process(*sizes, "--port", str(port)) as server:
        server.wait_ready(url, START_S)
        chaos = Chaos(Siege(url), seed=3)
        chaos.run(6)
        report = chaos.report()
        print(json.dumps(report))
        assert report["failed"] == report["wrong"] == report["unnoticed"] == []
        assert report["losses"] == 6 and len(report["scalings"]) >= 1


def test_readiness_is_red_exactly_while_nothing_can_be_served(tmp_path: Path) -> None:
    """3 actors with 3 slots hold 7 experts, two do not."""
    model = write_checkpoint(tmp_path / "tiny", tokenizer=True, num_hidden_layers=4, num_experts=7)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    sizes = ["--expert-actors", "3", "--slots-per-actor", "3"]
    with server_process(model, *sizes, "--port", str(port)) as server:
        server.wait_ready(url, START_S)
        siege = Siege(url, model="tiny", tokens=200, streams=4)
        siege.learn()
        seen: list[tuple[int, str]] = []
        refused: list[tuple[int, str, str]] = []

        def harm() -> None:
            os.kill(siege.status()["experts"][1]["pid"], signal.SIGKILL)
            end = time.monotonic() + 60
            while time.monotonic() < end:
                status, body = _get(f"{url}/ready")
                if not seen or seen[-1] != (status, body):
                    seen.append((status, body))
                if status != 200 and not refused:
                    refused.append(_complete(url))
                if status == 200 and refused:
                    return
                time.sleep(0.02)

        result = siege.storm(harm)
        assert result.failed == [] and result.wrong == []
        red = [body for status, body in seen if status == 503]
        assert red and all("expert" in body and "have no room" in body for body in red)
        assert seen[-1][0] == 200 and {status for status, _ in seen} <= {200, 503}
        status, body, retry = refused[0]
        assert status == 503 and "have no room" in body and retry.isdecimal()
        assert _complete(url)[0] == 200


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def _complete(url: str) -> tuple[int, str, str]:
    """(status, body, Retry-After) of one short request."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode(), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers.get("Retry-After", "")
