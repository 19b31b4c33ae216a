"""The image, as far as a machine without a container engine can look: the Dockerfile is parsed and
linted, and the wheel that it installs is built and looked into."""

import fnmatch
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from dockerfile_parse import DockerfileParser

import expertmesh
from tests.helm.chart import CHART, ROOT, container, pod, render
from tests.support.tools import require_tool

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")
# What no version of this repository can pin: Debian's packages, and the wheel just built.
ALLOWED = {"DL3008", "DL3013"}


@pytest.fixture(scope="module")
def instructions() -> list[dict[str, Any]]:
    with DOCKERFILE.open("rb") as file:
        parsed: list[dict[str, Any]] = DockerfileParser(fileobj=file).structure
    return parsed


def values(instructions: list[dict[str, Any]], name: str) -> list[str]:
    return [entry["value"] for entry in instructions if entry["instruction"] == name]


def test_hadolint() -> None:
    hadolint = require_tool(str(Path(sys.executable).with_name("hadolint")), "hadolint")
    ignore = [f"--ignore={rule}" for rule in ALLOWED]
    done = subprocess.run([hadolint, *ignore, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shell_of_every_step_parses(instructions: list[dict[str, Any]]) -> None:
    for step in values(instructions, "RUN"):
        assert subprocess.run(["/bin/bash", "-n", "-c", step]).returncode == 0, step


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_what_the_variants_install(
    instructions: list[dict[str, Any]], variant: str, tmp_path: Path
) -> None:
    """The first stage's steps with every program replaced by one that says how it was called."""
    for program in ("pip", "rm", "ln"):
        stub = tmp_path / program
        stub.write_text(f'#!/bin/bash\necho {program} "$@"\n')
        stub.chmod(0o755)
    arguments = dict(value.split("=", 1) for value in values(instructions, "ARG"))
    env = arguments | {"VARIANT": variant, "PATH": str(tmp_path)}
    torch, wheel = (
        subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", step],
            env=env, cwd=tmp_path, capture_output=True, text=True, check=True,
        ).stdout
        for step in values(instructions, "RUN")[:2]
    )  # fmt: skip
    assert f"torch=={arguments['TORCH_VERSION']}" in torch
    assert ("--index-url" in torch) == (variant == "cpu")
    assert ("[gpu]" in wheel) == (variant == "gpu")
    assert wheel.count("ln -s ../../") == 4
    assert "pip wheel --no-deps" in wheel


def test_what_is_copied_exists_and_is_not_ignored(instructions: list[dict[str, Any]]) -> None:
    patterns = IGNORED.read_text().splitlines()
    let_in = [line[1:] for line in patterns if line.startswith("!")]
    for copy in values(instructions, "COPY"):
        *sources, _ = shlex.split(copy)
        if sources[0].startswith("--from="):
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert source in let_in, source
    assert "*" in patterns
    assert not fnmatch.filter(let_in, ".git*")


def test_the_second_stage_runs_as_nobody_with_nothing_to_hide(
    instructions: list[dict[str, Any]],
) -> None:
    names = [entry["instruction"] for entry in instructions]
    assert names.count("FROM") == 2
    assert values(instructions, "USER") == ["10001:10001"]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert values(instructions, "ENTRYPOINT") == ['["expertmesh"]']
    assert values(instructions, "WORKDIR")[-1] == "/srv"
    assert "HEALTHCHECK" in names
    text = DOCKERFILE.read_text()
    assert not re.search(r"(?i)(token|secret|password|api_?key)\s*=", text)
    labels = "\n".join(values(instructions, "LABEL"))
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


def test_image_chart_and_project_agree(instructions: list[dict[str, Any]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(value.split("=", 1) for value in values(instructions, "ARG"))
    assert f"torch=={arguments['TORCH_VERSION']}" in project["dependencies"]
    assert arguments["VERSION"] == expertmesh.__version__
    chart = (CHART / "Chart.yaml").read_text()
    assert f'appVersion: "{arguments["VERSION"]}"' in chart
    objects = render()
    ray = next(line for line in project["dependencies"] if line.startswith("ray["))
    assert ray.endswith(f"=={objects_ray_version(objects)}")
    user = values(instructions, "USER")[0].split(":")
    context = pod(objects, "head")["securityContext"]
    assert [str(context["runAsUser"]), str(context["runAsGroup"])] == user
    exposed = values(instructions, "EXPOSE")[0].split()
    door = container(render(grpc={"enabled": True}), "front-door")
    ports = {port["name"]: str(port["containerPort"]) for port in door["ports"]}
    assert exposed == [ports["serve"], ports["grpc"]]


def objects_ray_version(objects: list[dict[str, Any]]) -> str:
    (service,) = [thing for thing in objects if thing["kind"] == "RayService"]
    return str(service["spec"]["rayClusterConfig"]["rayVersion"])


def test_the_wheel_carries_every_file_of_the_code(tmp_path: Path) -> None:
    """Built from a copy of what the Dockerfile copies: building leaves files behind."""
    source = tmp_path / "source"
    tracked = ["git", "ls-files", "-z", "--", ".src", "kernels", "actors", "cluster", "deploy"]
    files = subprocess.run(tracked, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in [*filter(None, (file.decode() for file in files)), "pyproject.toml", "README.md"]:
        if not (ROOT / name).exists():
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    (source / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*build, "--wheel-dir", tmp_path, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {
        f"expertmesh/{path.relative_to(source)}"
        for folder in ("kernels", "actors", "cluster", "deploy")
        for path in (source / folder).rglob("*")
        if path.is_file() and "docker" not in path.parts
    }
    missing = code - inside
    assert not missing, f"package-data in pyproject.toml leaves out {sorted(missing)}"
