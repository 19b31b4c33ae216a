"""`expertmesh routing`: against a server that answers like ours, and against recorded files."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from expertmesh.actors.exchange.counting import RoutingSnapshot
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.recording import Recording, holds_of, load_recording
from expertmesh.cluster.placement import contiguous_placement
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.deploy.routing.commands import routing

LAYERS, EXPERTS, TOP_K, ACTORS = (1, 2, 3), 8, 2, 2
PLACEMENT = contiguous_placement(LAYERS, EXPERTS, ACTORS)


def hits(dead: bool = False) -> np.ndarray:
    counts = np.random.default_rng(0).integers(200, 900, (len(LAYERS), EXPERTS))
    if dead:
        counts[1, 5] = 0
    return counts


def ledger_report(windows: int = 1, dead: bool = False) -> dict[str, Any]:
    ledger, total = Ledger(LAYERS, EXPERTS, TOP_K), np.zeros((len(LAYERS), EXPERTS), np.int64)
    zero = (0,) * len(LAYERS)
    for step in range(windows):
        total = total + hits(dead and step > windows - 3)
        packed = total.astype("<i8").tobytes()
        shot = RoutingSnapshot("a", LAYERS, EXPERTS, TOP_K, step, packed, zero, zero)
        ledger.add(shot, rows_sent=int(total.sum() // TOP_K * 1.5))
        ledger.add_actor("expert-0", {1: 700 * (step + 1)}, {1: 2.0 * (step + 1)})
        ledger.close_window(10.0)
    plain: dict[str, Any] = msgspec.to_builtins(ledger.report(PLACEMENT, "nano"))
    return plain


def recorded(tokens: int = 40) -> Recording:
    ids = np.random.default_rng(1).random((tokens, len(LAYERS), EXPERTS)).argsort(2)
    trace = ids[:, :, :TOP_K].astype(np.int16)
    trace[: tokens // 2, 1] = [3, 6]
    counts = np.stack([np.bincount(one.ravel(), minlength=EXPERTS) for one in trace.swapaxes(0, 1)])
    holds = holds_of(PLACEMENT, LAYERS, EXPERTS)
    return Recording(LAYERS, EXPERTS, TOP_K, 2.0, counts, trace, holds, "nano")


class Server(HTTPServer):
    """Answers the two routes; `answer` replaces the next one: status and body."""

    answer: tuple[int, bytes] | None = None
    asked: list[tuple[str, Any, str | None]]


class Routes(BaseHTTPRequestHandler):
    server: Server

    def _answer(self, body: bytes) -> None:
        status, body = self.server.answer or (200, body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.server.asked.append((self.path, None, self.headers.get("authorization")))
        self._answer(json.dumps(ledger_report()).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, body, self.headers.get("authorization")))
        self._answer(recorded(body["tokens"]).to_bytes())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Routes)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(*arguments: object, server: Server | None = None) -> Result:
    url = [] if server is None else ["--url", f"http://127.0.0.1:{server.server_port}"]
    return CliRunner().invoke(routing, [*map(str, arguments), *url], env={"COLUMNS": "120"})


def test_a_report_of_a_running_server_in_three_forms(server: Server, tmp_path: Path) -> None:
    png, numbers = tmp_path / "routing.png", tmp_path / "routing.json"
    result = run("report", "--png", png, "--json", numbers, server=server)
    assert result.exit_code == 0, result.output
    assert "3 MoE layers x 8 experts" in result.output
    assert "distinct expert actors per token and layer: 1.50" in result.output
    assert "expert-0" in result.output and "20%" in result.output
    assert json.loads(numbers.read_text()) == ledger_report()
    assert server.asked == [("/mesh/routing", None, None)]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert drawn(png) > 1000


def drawn(png: Path) -> int:
    """Distinct colours: an empty canvas has one, axes and text a few grey ones."""
    from matplotlib.image import imread

    return len(np.unique(imread(png).reshape(-1, 4), axis=0))


def test_json_on_stdout_is_nothing_but_json(server: Server) -> None:
    result = run("report", "--json", "-", server=server)
    answer = json.loads(result.output)
    assert answer["layers"][0]["imbalance"] == pytest.approx(
        ledger_report()["layers"][0]["imbalance"]
    )
    assert {"gini", "entropy", "dead", "unhit", "loads", "rank_loads", "pairs"} <= set(
        answer["layers"][0]
    )


def test_a_report_of_a_file_names_the_pairs(tmp_path: Path) -> None:
    path = tmp_path / "traffic.npz"
    path.write_bytes(recorded(400).to_bytes())
    result = run("report", path, "--png", tmp_path / "map.png")
    assert result.exit_code == 0, result.output
    assert "3 + 6" in result.output
    assert drawn(tmp_path / "map.png") > 1000


def test_dead_experts_stand_out(server: Server, tmp_path: Path) -> None:
    report = ledger_report(30, dead=True)
    assert report["layers"][1]["dead"] == [5]
    server.answer = 200, json.dumps(report).encode()
    result = run("report", "--png", tmp_path / "map.png", server=server)
    assert "alarms: dead_expert 1" in result.output
    assert drawn(tmp_path / "map.png") > 1000


@pytest.mark.parametrize("placement", [PLACEMENT, None], ids=["mesh", "one process"])
def test_without_load_there_are_dashes(server: Server, tmp_path: Path, placement: Any) -> None:
    empty = msgspec.to_builtins(Ledger(LAYERS, EXPERTS, TOP_K).report(placement))
    server.answer = 200, json.dumps(empty).encode()
    result = run("report", "--png", tmp_path / "map.png", server=server)
    assert result.exit_code == 0, result.output
    assert "nan" not in result.output.lower() and " - " in result.output


def test_record_writes_what_the_server_has_packed(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "traffic.npz"
    result = run("record", path, "--seconds", 3, "--tokens", 25, server=server)
    assert result.exit_code == 0, result.output
    assert server.asked == [("/mesh/routing/record", {"seconds": 3.0, "tokens": 25}, None)]
    assert np.array_equal(load_recording(path).trace_NLK, recorded(25).trace_NLK)
    assert "25 tokens in 2.0 s" in result.output


def test_a_record_of_no_traffic_says_so(server: Server, tmp_path: Path) -> None:
    server.answer = 200, recorded(0).to_bytes()
    result = run("record", tmp_path / "traffic.npz", server=server)
    assert result.exit_code == 0 and "the record is empty" in result.output


def test_the_admin_token_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTMESH_ADMIN_TOKEN", "secret")
    run("report", server=server)
    assert server.asked[0][2] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "body", "code", "says"),
    [
        (503, {"error": {"message": "no keeper answers"}}, ExitCode.UNREACHABLE, "no keeper"),
        (401, {"error": {"message": "token"}}, ExitCode.UNREACHABLE, "EXPERTMESH_ADMIN_TOKEN"),
        (400, {"error": {"message": "too many", "param": "tokens"}}, ExitCode.USAGE, "--tokens"),
        (200, {"something": "else"}, ExitCode.UNREACHABLE, "not answer like"),
        (200, None, ExitCode.UNREACHABLE, "not answer like"),
    ],
)
def test_refusals_are_one_line_and_an_exit_code(
    server: Server, status: int, body: Any, code: ExitCode, says: str
) -> None:
    server.answer = status, b"<html>" if body is None else json.dumps(body).encode()
    result = run("report", server=server)
    assert (result.exit_code, "Traceback" in result.output) == (code, False)
    assert says in result.output


def test_nobody_there_and_no_such_file(tmp_path: Path) -> None:
    result = run("report", "--url", "http://127.0.0.1:1")
    assert result.exit_code == ExitCode.UNREACHABLE and "no server answers" in result.output
    result = run("report", tmp_path / "none.npz")
    assert result.exit_code == ExitCode.USAGE and "none.npz" in result.output
    (tmp_path / "text.npz").write_text("hello")
    result = run("report", tmp_path / "text.npz")
    assert result.exit_code == ExitCode.USAGE and "not a routing recording" in result.output


def test_a_damaged_recording_is_not_written(server: Server, tmp_path: Path) -> None:
    server.answer = 200, recorded(10).to_bytes()[:-50]
    path = tmp_path / "traffic.npz"
    assert run("record", path, server=server).exit_code == ExitCode.UNREACHABLE
    assert not path.exists()
    result = run("record", tmp_path / "missing" / "traffic.npz", server=server)
    assert result.exit_code == ExitCode.USAGE and "there is no folder" in result.output


def test_help_does_not_wait_for_heavy_imports() -> None:
    code = (
        "import sys; from expertmesh.deploy.routing.commands import routing\n"
        "assert not {'torch', 'numpy', 'matplotlib', 'rich.table'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
