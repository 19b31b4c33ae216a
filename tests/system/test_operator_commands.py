"""`expertmesh routing` and `expertmesh scale` against a real server, and what /metrics counts."""

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import httpx

from tests.support.checkpoints import write_checkpoint
from tests.support.http_server import free_port
from tests.support.server_process import server_process
from tests.support.siege import Siege
from tests.system.chaos import START_S

LAYERS, TOP_K = 3, 2


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "expertmesh", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


def metric(text: str, name: str) -> float:
    """Sum over all series of a counter or gauge."""
    found = re.findall(rf"^expertmesh_{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not exported"
    return sum(map(float, found))


def test_traffic_is_counted_once_recorded_reported_and_the_mesh_scaled(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "tiny", tokenizer=True, num_hidden_layers=4, num_experts=7)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    arguments = ["--attention-replicas", "2", "--port", str(port)]
    with server_process(model, *arguments) as server:
        server.wait_ready(url, START_S)
        siege = Siege(url, model="tiny", tokens=30, streams=6)
        siege.learn()

        text = httpx.get(f"{url}/metrics", timeout=30).text
        # The last token of an answer is handed out, never computed.
        tokens = metric(text, "prompt_tokens_total") + metric(text, "generation_tokens_total") - 6
        assert metric(text, "moe_routed_rows_total") == tokens * LAYERS
        sent = metric(text, "moe_dispatched_rows_total")
        assert sent == metric(text, "expert_rows_total") and sent >= tokens * LAYERS
        assert metric(text, "expert_up") == 2

        record = tmp_path / "traffic.npz"
        recording = threading.Thread(
            target=lambda: run(
                "routing", "record", str(record), "--url", url, "--tokens", "50", "--seconds", "60"
            )
        )
        recording.start()
        while recording.is_alive():
            assert siege.storm(lambda: None).failed == []
        assert record.exists()
        picture, numbers = tmp_path / "heat.png", tmp_path / "report.json"
        for source in ([str(record)], ["--url", url]):
            outputs = ["--png", str(picture), "--json", str(numbers)]
            told = run("routing", "report", *source, *outputs)
            assert told.returncode == 0, told.stderr
            assert picture.read_bytes().startswith(b"\x89PNG")
            report = json.loads(numbers.read_text())
            assert len(report["layers"]) == LAYERS and report["top_k"] == TOP_K
            picture.unlink()

        ledger = ["--url", url, "--ledger", str(tmp_path / "ledger"), "--json"]
        load = run("cost", "load", "--requests", "6", "--max-tokens", "8", *ledger)
        assert load.returncode == 0, load.stderr
        counted = json.loads(load.stdout)
        assert counted["completed"] == 6 and 6 <= counted["generated_tokens"] <= 48
        # The front door, two attention replicas and two expert actors: each holds torch.
        assert counted["memory_of"] == "processes" and counted["memory_bytes"] > 5 * 100e6
        session = json.loads(run("cost", "session", *ledger).stdout)
        assert (
            session["generated_tokens"] >= counted["generated_tokens"] and session["completed"] >= 6
        )

        dry = run("scale", "--url", url, "--experts", "+1", "--dry-run")
        assert dry.returncode == 0 and siege.status()["desired"]["experts"] == 2
        assert run("scale", "--url", url, "--experts", "+1").returncode == 0
        assert len(siege.wait_whole()["experts"]) == 3
        refused = run("scale", "--url", url, "--experts", "8")
        assert refused.returncode != 0 and "7 experts per layer fit" in refused.stderr
        assert siege.storm(lambda: None).wrong == []
