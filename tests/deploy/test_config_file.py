"""`--config FILE`: values become defaults, flags and environment win, bad keys are named."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from expertmesh.deploy import serve_command
from expertmesh.deploy.cli import app
from expertmesh.deploy.serve_options import ServeOptions

FILE = """
port: 8123
max-running: 64
autoscale_dry_run: true
served_model_name: null
http: {cors_origins: ["https://chat.example"], body_bytes: 1000000}
grpc: {port: 50052, reflection: false}
queue: {running: 8}
"""


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs `expertmesh serve` with a file up to its options."""
    taken: list[ServeOptions] = []
    monkeypatch.setattr(serve_command, "run", taken.append)

    def run(text: str, *flags: str, env: dict[str, str] | None = None) -> ServeOptions | str:
        taken.clear()
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        result = CliRunner().invoke(app, ["serve", "--config", str(path), *flags], env=env)
        return taken[0] if taken else f"{result.exit_code}: {result.output}"

    return run


def test_the_file_gives_defaults_and_sections(serve: Any) -> None:
    options = serve(FILE)
    assert (options.port, options.max_running, options.autoscale_dry_run) == (8123, 64, True)
    assert options.kv_pages == 512, "what the file does not say keeps its default"
    assert options.served_model_name is None
    edge = options.edge
    assert edge.http.cors_origins == ("https://chat.example",)
    assert edge.limits().body_bytes == 1_000_000
    assert (edge.grpc.port, edge.grpc.reflection, edge.queue.running) == (50052, False, 8)


def test_flags_win_over_environment_over_file(serve: Any) -> None:
    env = {"EXPERTMESH_SERVE_PORT": "8200", "EXPERTMESH_SERVE_MAX_RUNNING": "7"}
    options = serve(FILE, "--max-running", "5", "--grpc-port", "50060", env=env)
    assert (options.port, options.max_running) == (8200, 5)
    assert options.edge.grpc.port == 50060
    assert options.edge.grpc.reflection is False, "a flag replaces one value, not the section"


def test_a_variable_with_a_version_does_not_end_the_command(serve: Any) -> None:
    options = serve("port: 8123", env={"EXPERTMESH_VERSION": "1"})
    assert not isinstance(options, str), options
    assert options.port == 8123


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prot: 1", "unknown key 'prot'"),
        ("config: other.yaml", "unknown key 'config'"),
        ("grpc: {ports: 1}", "'grpc.ports': unknown key"),
        ("grpc: 5", "'grpc'"),
        ("http: {tls: {cert_file: a}}", "'http.tls.key_file'"),
        ("queue: {running: 0}", "'queue.running'"),
        ("port: [1]", "'port' must be a single value"),
        ("- 1", "must be a mapping"),
        ("port: {", "serve.yaml"),
        ("port: 2027-02-31", "serve.yaml"),
        ("port: eighty", "serve.yaml: 'port'"),
        ("port: 99999", "serve.yaml: 'port'"),
        ("autoscale_dry_run: perhaps", "serve.yaml: 'autoscale_dry_run'"),
        ("decode_graphs: maybe", "'maybe' must be auto, on or off"),
    ],
)
def test_what_is_wrong_is_named(serve: Any, text: str, named: str) -> None:
    outcome = serve(text)
    assert isinstance(outcome, str) and outcome.startswith("2: ") and named in outcome


def test_on_and_off_are_words_and_booleans_are_not(serve: Any) -> None:
    options = serve("decode_graphs: off\nautoscale_dry_run: yes\ngrpc: {reflection: off}")
    assert (options.decode_graphs, options.autoscale_dry_run) == ("off", True)
    assert options.edge.grpc.reflection is False
    assert serve("autoscale_dry_run: true").autoscale_dry_run is True


def test_an_empty_file_is_all_defaults(serve: Any) -> None:
    assert serve("").port == 8000 and serve("port:").port == 8000
