"""The operator's guide: every command in it works, or is checked as far as this machine can.

What asks a server is run against real ones: one with the mesh of `expertmesh serve`, and one that
is started from the guide's own lines on keys. What needs hosts, a cloud or a Kubernetes cluster is
parsed by the program it calls. A command that this file does not know fails the test.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml
from ray.scripts import scripts as ray_scripts
from ray.serve import scripts as serve_scripts
from typer.testing import CliRunner

from expertmesh.actors.model.config import load_config
from expertmesh.deploy import preflight, serve_command
from expertmesh.deploy.cli import app
from expertmesh.deploy.config_file import read_config
from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.deploy.serve_options import ServeOptions
from tests.support.helm_tool import run_helm
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process
from tests.support.tools import require_tool

REPOSITORY = Path(__file__).resolve().parents[2]
GUIDE = REPOSITORY / "deploy/README.md"
K3 = REPOSITORY / "tests/golden/kimi_k3-config.json"
BASE = "http://127.0.0.1:8000"
_ASSIGNMENT = re.compile(r"[A-Z_]+=")  # of a variable, before a command


class Block(NamedTuple):
    section: str
    language: str
    text: str


class Command(NamedTuple):
    section: str
    line: str
    words: tuple[str, ...]


def blocks(guide: Path = GUIDE) -> list[Block]:
    found, section = [], ""
    pattern = re.compile(
        r"^## (?P<section>[^\n]+)$|^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S
    )
    for match in pattern.finditer(guide.read_text()):
        if match["section"]:
            section = match["section"]
        else:
            found.append(Block(section, match["language"], match["text"]))
    return found


def commands() -> list[Command]:
    found = []
    for block in blocks():
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = tuple(shlex.split(line, comments=True))
                if words:
                    found.append(Command(block.section, line, words))
    return found


# --- servers ------------------------------------------------------------------------------------


class Server(NamedTuple):
    process: ServerProcess
    url: str


def start(*arguments: str | Path) -> Iterator[Server]:
    port = free_port()
    with server_process(*arguments, "--port", str(port)) as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_ready(url, 240)
        yield Server(process, url)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Server]:
    """`make serve`."""
    yield from start("--expert-actors", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: a checkout, with room for the files that they write."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("deploy", "helm", "Makefile", "pyproject.toml"):
        (folder / name).symlink_to(REPOSITORY / name)
    (text,) = [block.text for block in blocks() if block.language == "yaml"]
    (folder / "serve.yaml").write_text(text.replace("50051", str(free_port())))
    return folder


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    (line,) = [one.words for one in commands() if one.words[:3] == ("expertmesh", "keys", "new")]
    made = subprocess.run(
        [sys.executable, "-m", *line], cwd=folder, capture_output=True, text=True, check=True
    )
    return made.stdout.strip()


@pytest.fixture(scope="module")
def keyed(folder: Path, key: str, request: pytest.FixtureRequest) -> Iterator[Server]:
    """From the guide's own command, in its own folder."""
    (line,) = [one.words[2:] for one in commands() if "serve.yaml" in one.words]
    os.chdir(folder)
    try:
        yield from start(*line)
    finally:
        # Not where it was asked for: that test had changed the folder, too.
        os.chdir(request.config.invocation_params.dir)


# --- how a command is checked -------------------------------------------------------------------


class Case:
    """One command in its folder."""

    def __init__(self, command: Command, folder: Path, request: pytest.FixtureRequest) -> None:
        self.command, self.folder, self._request = command, folder, request
        program = dropwhile(_ASSIGNMENT.match, command.words)
        self.words = [word.removeprefix(".venv/bin/") for word in program]

    @property
    def server(self) -> Server:
        name = "keyed" if self.command.section == "Keys and TLS" else "mesh"
        server: Server = self._request.getfixturevalue(name)
        return server

    @property
    def environment(self) -> dict[str, str]:
        key = self._request.getfixturevalue("key")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return os.environ | {"PATH": path, "EXPERTMESH_API_KEY": key, "OMP_NUM_THREADS": "1"}

    def shell(self, line: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def files_exist(self) -> None:
        for word in self.words[1:]:
            if "/" in word and not word.startswith(("/models/", "http", "-")):
                assert (self.folder / word).exists(), f"{word} of: {self.command.line}"


def parse(group: Any, words: list[str]) -> None:
    """By the program's own parser; it raises for what it does not know."""
    context = None
    while hasattr(group, "commands"):
        name = words.pop(0)
        group = group.get_command(context, name) or pytest.fail(f"no such command: {name}")
    group.make_context(group.name, words)


def live(case: Case) -> None:
    """Against the section's server."""
    environment = {"EXPERTMESH_URL": case.server.url, "EXPERTMESH_COST_LEDGER": "ledger"}
    result = CliRunner().invoke(app, case.words[1:], env=environment)
    assert result.exit_code == ExitCode.OK, f"{case.command.line}\n{result.output}"


def serve(case: Case) -> None:
    """A model that is here is checked for real. Others: the options, with K3's config."""
    if "/models/" not in case.command.line.replace("deploy/models/", ""):
        given = [*case.words[2:], "--dry-run", "--port", str(free_port())]
        result = CliRunner().invoke(app, ["serve", *given])
        assert result.exit_code == ExitCode.OK, result.output
        return
    taken: list[ServeOptions] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(serve_command, "run", taken.append)
    try:
        result = CliRunner().invoke(app, case.words[1:])
        assert result.exit_code == ExitCode.OK, result.output
    finally:
        patch.undo()
    (options,) = taken
    (case.folder / "config.json").write_text(K3.read_text())
    config = load_config(case.folder)
    preflight.check_placement(config, options.expert_actors)
    settings = options.cluster(config, options.slots_per_actor)
    assert settings.actors == options.attention_replicas + options.expert_actors


def expertmesh(case: Case) -> None:
    known: dict[str, Callable[[Case], None]] = {
        "serve": serve, "scale": live, "routing": live, "cost": live, "keys": keys,
        "verify": live_without_server, "doctor": parsed, "cluster": parsed, "bench": parsed,
        "sessions": sessions, "eval": parsed,
    }  # fmt: skip
    known[case.words[1]](case)


def keys(case: Case) -> None:
    if case.words[2] == "new":
        assert case._request.getfixturevalue("key")
        return
    case._request.getfixturevalue("key")
    live_without_server(case)


def sessions(case: Case) -> None:
    """What needs a session of that name is run in test_sessions.py, here and in tests/system."""
    (live if case.words[2] == "list" else parsed)(case)


def live_without_server(case: Case) -> None:
    result = CliRunner().invoke(app, case.words[1:])
    assert result.exit_code == ExitCode.OK, f"{case.command.line}\n{result.output}"


def parsed(case: Case) -> None:
    """Run for real in test_{doctor,bench_residual,bench_kernels,bench_tiers,ray_files}.py,
    eval/test_longcontext.py and test_hosts.py."""
    case.files_exist()
    parse(typer.main.get_command(app), case.words[1:])


def curl(case: Case) -> None:
    line = case.command.line.replace(BASE, case.server.url).replace("curl -s", "curl -sS --fail")
    assert case.server.url in line
    assert case.shell(line), line


def make(case: Case) -> None:
    case.shell(shlex.join(["make", "--dry-run", *case.words[1:]]))


def pip(case: Case) -> None:
    text = case.shell(shlex.join([sys.executable, "-m", "pip", case.words[1], "--help"]))
    for flag in (word for word in case.words if word.startswith("--")):
        assert f"{flag} " in text or f"{flag}\n" in text, flag


def ray(case: Case) -> None:
    case.files_exist()
    parse(ray_scripts.cli, case.words[1:])


def ray_serve(case: Case) -> None:
    """On a cluster with the token of our files, which Ray's commands send only when told to."""
    assert "RAY_AUTH_MODE=token" in case.command.words, case.command.line
    case.files_exist()
    parse(serve_scripts.cli, case.words[1:])


def helm(case: Case) -> None:
    case.files_exist()
    done = run_helm(*[case.folder / w if w.startswith("helm/") else w for w in case.words[1:]])
    assert done.returncode == 0, done.stderr


def promtool(case: Case) -> None:
    case.shell(shlex.join([str(require_tool("promtool")), *case.words[1:]]))


def python(case: Case) -> None:
    main = import_module(f"{case.words[2]}.__main__").main
    assert case.words[1] == "-m" and main(case.words[3:]) == 0


KNOWN: dict[str, Callable[[Case], None]] = {
    "expertmesh": expertmesh, "curl": curl, "make": make, "pip": pip, "ray": ray,
    "serve": ray_serve, "helm": helm, "promtool": promtool, "python": python,
}  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", commands(), ids=lambda command: " ".join(command.words[:4]))
def test_command(
    command: Command, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(command, folder, request)
    assert case.words[0] in KNOWN, f"nobody knows how to check: {command.line}"
    monkeypatch.chdir(folder)
    KNOWN[case.words[0]](case)


# --- the rest of the guide ----------------------------------------------------------------------


def test_only_known_languages_and_a_good_config(folder: Path) -> None:
    assert {block.language for block in blocks()} == {"bash", "yaml"} and len(commands()) > 30
    values, edge = read_config(folder / "serve.yaml", {"max_running": int})
    assert values == {"max_running": 64} and edge.auth.keys_file == Path("keys.yaml")
    # What is commented out is meant to be usable, too.
    text = (folder / "serve.yaml").read_text().replace("# tls:", "tls:")
    (folder / "tls.yaml").write_text(text)
    assert read_config(folder / "tls.yaml", {"max_running": int})[1].http.tls is not None
    assert yaml.safe_load(text)["http"]["tls"]["key_file"] == "key.pem"


def table(section: str) -> list[list[str]]:
    text = GUIDE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= set("|- ")]


def test_every_exit_code_is_explained() -> None:
    assert [row[0] for row in table("Exit codes")] == [str(int(code)) for code in ExitCode]


def test_messages_are_said_by_the_program() -> None:
    sources = " ".join(
        re.sub(r'"\s*\n\s*f?"', "", path.read_text())  # a string that goes on in the next line
        for part in ("deploy", "cluster", "actors")
        for path in (REPOSITORY / part).rglob("*.py")
    )
    for row in table("Troubleshooting")[1:]:
        for piece in row[0].strip("`").split("…"):
            words = [word for word in re.split(r"\d+|/dev/shm", piece) if word.strip()]
            for word in words:
                assert word.strip() in sources, f"{row[0]}: nobody says {word!r}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / target).exists(), target
    for path in re.findall(r"`((?:deploy|tests|helm)/[\w./-]+)`", GUIDE.read_text()):
        assert (REPOSITORY / path).exists(), path
