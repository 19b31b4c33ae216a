"""`expertmesh keys`, and the keys that `expertmesh serve` takes from flag, file and environment."""

import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from expertmesh.deploy import serve_command
from expertmesh.deploy.auth.keys import HASH_PATTERN, file_line, hash_key, parse_keys
from expertmesh.deploy.cli import app
from expertmesh.deploy.serve_app import AppSettings
from expertmesh.deploy.serve_options import ServeOptions
from tests.support.http_server import free_port

CANARY = "em-canary-5d1e8f20"


def keys(*arguments: str | Path, piped: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)], input=piped)
    return result.exit_code, result.stdout, result.stderr


def test_a_new_key_is_shown_once_with_its_line() -> None:
    code, out, _ = keys("new", "team-a")
    assert code == 0
    shown, line = (row.split(maxsplit=1)[1] for row in out.splitlines())
    assert shown.startswith("em-") and line == file_line("team-a", hash_key(shown))
    assert keys("new", "team-a")[1] != out


@pytest.mark.parametrize(
    "before",
    [
        "", file_line("old", hash_key("old")), f"- name: old\n  hash: {hash_key('old')}\n",
        f"keys:\n  - name: old\n    hash: {hash_key('old')}\n",
        f"keys:\n- name: old\n  hash: {hash_key('old')}  # a comment that stays",
    ],
)  # fmt: skip
def test_a_new_key_is_added_to_a_file_of_any_form(tmp_path: Path, before: str) -> None:
    path = tmp_path / "keys"
    if before:
        path.write_text(before)
        path.chmod(0o640)
    code, out, _ = keys("new", "team-a", "--file", path)
    assert code == 0 and out.count("\n") == 1
    text = path.read_text()
    assert text.startswith(before) and out.strip() not in text
    assert hash_key(out.strip()) in {key.hash for key in parse_keys(text.encode())}
    assert stat.S_IMODE(path.stat().st_mode) == (0o640 if before else 0o600)
    assert keys("check", path)[0] == 0
    assert [one.name for one in tmp_path.iterdir()] == ["keys"], "nothing else is left"


def test_what_a_key_can_not_be_added_to_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{CANARY}: [")
    code, _, error = keys("new", "team-a", "--file", path)
    assert code == 2 and path.read_text() == f"{CANARY}: [" and "canary" not in error
    path.write_text(file_line("team-a", hash_key("x")) + "\n")
    code, _, error = keys("new", "team-a", "--file", path)
    assert code == 2 and "same name" in error
    code, _, error = keys("new", "two words")
    assert code == 2 and "name" in error


def test_a_key_that_exists_is_hashed_from_a_pipe(tmp_path: Path) -> None:
    code, out, error = keys("hash", "mine", piped=f"{CANARY}\n")
    assert (code, out.strip()) == (0, file_line("mine", hash_key(CANARY)))
    assert CANARY not in out + error
    path = tmp_path / "keys"
    assert keys("hash", "mine", "--file", path, piped=CANARY)[:2] == (0, "")
    assert keys("check", path, "--key", piped=CANARY)[:2] == (0, "mine\n")
    assert keys("check", path, "--key", piped="em-other")[0] == 1
    assert keys("hash", "mine", piped="two words\n")[0] == 2
    assert keys("hash", "mine", piped="")[0] == 2


def test_check_shows_names_and_limits_and_no_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    a, b = hash_key("a"), hash_key("b")
    path.write_text(
        f"- {{name: a, hash: '{a}', requests_per_minute: 60, expires: 2020-01-01}}\n"
        f"- {{name: b, hash: '{b}', disabled: true}}\n"
    )
    code, out, _ = keys("check", path)
    assert code == 0 and "requests_per_minute 60" in out and "disabled True" in out
    assert "2020-01-01" in out and a not in out and b not in out
    assert keys("check", path, "--key", piped="b")[1] == "b (expired or disabled)\n"
    path.write_text("- {name: a}")
    code, _, error = keys("check", path)
    assert code == 2 and "keys.yaml: key 1: hash" in error
    assert keys("check", tmp_path / "none")[0] == 2


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs `expertmesh serve` up to its options."""
    taken: list[ServeOptions] = []
    monkeypatch.setattr(serve_command, "run", taken.append)

    def run(*flags: str | Path, env: dict[str, str] | None = None) -> ServeOptions | str:
        taken.clear()
        result = CliRunner().invoke(app, ["serve", *map(str, flags)], env=env)
        return taken[0] if taken else f"{result.exit_code}: {result.output}"

    return run


def test_serve_takes_keys_from_everywhere(serve: Any, tmp_path: Path) -> None:
    path, config = tmp_path / "keys", tmp_path / "serve.yaml"
    path.write_text(file_line("a", hash_key("a")))
    config.write_text(f"auth: {{keys_file: {path}, key_hashes: ['{hash_key('b')}']}}")
    env = {"EXPERTMESH_API_KEYS": f"{CANARY}, b"}
    auth = serve("--config", config, env=env).edge.auth
    assert auth.keys_file == path and auth.key_hashes == (hash_key("b"), hash_key(CANARY))
    assert serve("--api-keys", path).edge.auth.keys_file == path
    assert serve(env={"EXPERTMESH_SERVE_API_KEYS": str(path)}).edge.auth.keys_file == path
    assert CANARY not in repr(serve("--config", config, env=env))


def test_serve_does_not_start_open_or_broken(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text(f"- {{name: a, hash: {CANARY}}}")
    (tmp_path / "config").write_text(f"auth: {{key_hashes: [{CANARY}]}}")
    for outcome, said in (
        (serve(env={"EXPERTMESH_API_KEYS": " , "}), "holds no key"),
        (serve("--api-keys", tmp_path / "broken"), "key 1: hash"),
        (serve("--api-keys", tmp_path / "none"), "--api-keys"),
        (serve("--config", tmp_path / "config"), "auth.key_hashes"),
    ):
        assert outcome.startswith("2: ") and said in outcome and "canary" not in outcome


def test_a_serve_config_that_has_a_key_for_its_hash_does_not_show_it() -> None:
    args = {"mesh": {"load": {"model": "/m"}}, "edge": {"auth": {"key_hashes": [CANARY]}}}
    with pytest.raises(ValueError, match="key_hashes") as raised:
        AppSettings.model_validate(args)
    assert "canary" not in f"{raised.value} {raised.value!r}"
    assert HASH_PATTERN in str(raised.value)


def test_a_server_that_anybody_may_use_says_so(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(file_line("a", hash_key("a")))

    def said(*flags: str | Path) -> str:
        wish = ["serve", "--dry-run", "--expert-actors", "0", "--port", str(free_port())]
        result = CliRunner().invoke(app, [*wish, *map(str, flags)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "whoever reaches" in said("--host", "0.0.0.0")
    assert "whoever reaches" not in said()
    assert "whoever reaches" not in said("--host", "0.0.0.0", "--api-keys", path)
