"""`expertmesh cluster wait`, and how Ray's token is offered; real hosts are in tests/system."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.deploy.hosts.commands import cluster
from expertmesh.deploy.hosts.probe import NodeFacts, look, warnings
from expertmesh.deploy.hosts.token import offer_token
from tests.support.http_server import free_port

HEAD = NodeFacts("10.0.0.1", "head", "2.60.0", "3.11.7", "0.1.0", 4 << 30, None)


def test_no_cluster_answers() -> None:
    address = f"127.0.0.1:{free_port()}"
    result = CliRunner().invoke(
        cluster, ["wait", "--nodes", "2", "--timeout", "0", "--address", address]
    )
    assert result.exit_code == ExitCode.UNREACHABLE
    assert address in result.output


def test_equal_nodes_need_no_word() -> None:
    assert warnings([HEAD, HEAD._replace(address="10.0.0.2", hostname="two")]) == []
    assert warnings([]) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ray": "2.59.0"}, "10.0.0.3 (odd) has ray 2.59.0, most have 2.60.0"),
        ({"python": "3.12.1"}, "10.0.0.3 (odd) has python 3.12.1, most have 3.11.7"),
        ({"expertmesh": "none"}, "10.0.0.3 (odd) has expertmesh none, most have 0.1.0"),
        ({"shm_bytes": 64 << 20}, "10.0.0.3 (odd): /dev/shm has 64 MB, at least 256 MB"),
        ({"address": "127.0.0.1"}, "127.0.0.1 (odd) knows itself only by a loopback address"),
    ],
)
def test_an_odd_node_is_named(change: dict[str, object], told: str) -> None:
    odd = HEAD._replace(address="10.0.0.3", hostname="odd")._replace(**change)  # type: ignore[arg-type]
    (warning,) = warnings([HEAD, HEAD._replace(address="10.0.0.2"), odd])
    assert warning.startswith(told)


def test_what_a_node_says_of_itself(tmp_path: Path) -> None:
    assert look("10.0.0.9", None).has_model is None
    assert look("10.0.0.9", str(tmp_path)).has_model is False
    (tmp_path / "config.json").write_text("{}")
    facts = look("10.0.0.9", str(tmp_path))
    assert facts.has_model is True and facts.address == "10.0.0.9"
    assert facts.ray == HEAD.ray and facts.shm_bytes > 0


def test_a_token_is_offered_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for there, environment, mode in [
        (False, {}, None),
        (False, {"RAY_AUTH_TOKEN": "x"}, "token"),
        (False, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}, None),
        (True, {}, "token"),
        (True, {"RAY_AUTH_MODE": "disabled"}, "disabled"),
    ]:
        if there:
            (tmp_path / ".ray").mkdir(exist_ok=True)
            (tmp_path / ".ray/auth_token").write_text("x")
        offer_token(environment)
        assert environment.get("RAY_AUTH_MODE") == mode
