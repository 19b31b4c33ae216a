"""The cluster files that ship, and what `expertmesh cluster check` finds in damaged ones."""

import copy
import platform
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.docker import docker_start_cmds
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from expertmesh.deploy.exit_codes import ExitCode
from expertmesh.deploy.hosts.check import findings
from expertmesh.deploy.hosts.commands import cluster
from expertmesh.deploy.hosts.findings import Finding
from expertmesh.deploy.serve_app import AppSettings
from tests.support.hosts import REPOSITORY

FILES = ("local", "aws")
Config = dict[str, Any]

# Without these a cluster works all the same; everything else is missed by name.
OPTIONAL = {
    "provider.availability_zone", "provider.cache_stopped_nodes", "provider.use_internal_ips",
    "idle_timeout_minutes", "setup_commands", "file_mounts.~/expertmesh-dist",
    "docker", "docker.pull_before_run", "docker.run_options",
    *(f"available_node_types.{kind}{key}" for kind in ("attention", "experts")
      for key in ("", ".labels", ".min_workers", ".node_config.ImageId", ".resources.CPU",
                  ".resources.GPU", f".resources.expertmesh_{kind.removesuffix('s')}")),
    "available_node_types.head.labels", "available_node_types.head.node_config.ImageId",
    "available_node_types.head.resources.CPU", "available_node_types.head.resources.GPU",
    *(f"available_node_types.{kind}.labels.expertmesh/tier"
      for kind in ("head", "attention", "experts")),
}  # fmt: skip


def shipped(name: str) -> Config:
    config: Config = yaml.safe_load((REPOSITORY / f"deploy/ray/{name}.yaml").read_text())
    return config


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Config]:
    """Filled in, as their comments say."""
    (tmp_path / "key").write_text("")
    local, aws = shipped("local"), shipped("aws")
    local["auth"]["ssh_private_key"] = str(tmp_path / "key")
    ours = ".".join(platform.python_version_tuple()[:2])
    lines = local["setup_commands"]
    local["setup_commands"] = [line.replace("python3.11", f"python{ours}") for line in lines]
    for config in (local, aws):
        config["file_mounts"] = dict.fromkeys(config["file_mounts"], str(tmp_path))
    aws["docker"]["image"] = f"registry.example.com/expertmesh:0.1.0@sha256:{'1f' * 32}"
    for kind in aws["available_node_types"].values():
        kind["node_config"]["ImageId"] = "ami-0123456789abcdef0"
    return {"local": local, "aws": aws}


def wrong(config: Config) -> list[Finding]:
    return [one for one in findings(copy.deepcopy(config)) if not one.warning]


def paths(config: Config, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def parent(config: Config, path: tuple[str, ...]) -> Config:
    for key in path[:-1]:
        config = config[key]
    return config


@pytest.mark.parametrize("name", FILES)
def test_what_ships_is_right(files: dict[str, Config], name: str) -> None:
    found = findings(copy.deepcopy(files[name]))
    examples = [one for one in found if one.warning and "an example's address" in one.message]
    assert found == examples  # they are there to be changed, and told
    assert len(examples) == (3 if name == "local" else 0)
    validate_config(prepare_config(copy.deepcopy(files[name])))
    # As it is, only what is marked to be changed is in the way.
    text = (REPOSITORY / f"deploy/ray/{name}.yaml").read_text()
    assert text.count("CHANGE") >= 3
    changed = ("file_mounts", "auth", "docker.image", "available_node_types", "setup_commands")
    assert all(one.key.startswith(changed) for one in wrong(shipped(name)))


@pytest.mark.parametrize("name", FILES)
def test_each_key_missing_in_turn(files: dict[str, Config], name: str) -> None:
    seen = set()
    for path in list(paths(files[name])):
        config = copy.deepcopy(files[name])
        del parent(config, path)[path[-1]]
        found, dotted = wrong(config), ".".join(path)
        if dotted in OPTIONAL:
            seen.add(dotted)
            assert found == [], dotted
        else:
            assert any(names(one, dotted) for one in found), f"{dotted} is missing; told: {found}"
    assert seen


def names(one: Finding, dotted: str) -> bool:
    """The key, or what it is part of; a node type is named where the file asks for it."""
    near = dotted.startswith(one.key) or one.key.startswith(dotted)
    return near or (one.key == "head_node_type" and one.message.startswith(dotted.split(".")[-1]))


def check(tmp_path: Path, config: Config, *flags: str) -> tuple[int, str]:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(cluster, ["check", str(file), *flags])
    return result.exit_code, result.output


CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("aws", "available_node_types.experts.min_workers", 9, "experts.min_workers: is 9, more than"),
    ("aws", "available_node_types.experts.min_workers", -1, "experts.min_workers: is -1"),
    ("aws", "available_node_types.experts.max_workers", 40, "experts.max_workers: is 40, more"),
    ("aws", "max_workers", 7, "max_workers: is 7, the node types' min_workers add up to 8"),
    ("aws", "head_node_type", "chief", "head_node_type: chief is none of available_node_types"),
    ("aws", "min_workers", 2, "min_workers: is a key of each node type now"),
    ("aws", "initial_workers", 2, "initial_workers: is gone"),
    ("aws", "head_node", {"InstanceType": "x"}, "head_node: is available_node_types"),
    ("aws", "available_node_types.experts.max_worker", 3, "experts.max_worker: is no key"),
    ("aws", "max_workers", "many", "max_workers: 'many' is not of type 'integer'"),
    ("local", "max_workers", 1, "max_workers: is 1 with 2 worker_ips: 1 would never start"),
    ("local", "max_workers", 5, "max_workers: is 5 with 2 worker_ips: 3 would do not exist"),
    ("local", "provider.worker_ips", ["192.0.2.11"] * 2, "192.0.2.11 is there 2 times"),
    ("local", "provider.worker_ips", ["192.0.2.10", "192.0.2.1"], "192.0.2.10 is the head_ip"),
    ("local", "min_workers", 2, "min_workers: is a key of each node type now"),
    ("local", "head_node_type", "head", "head_node_type: is not for the local provider"),
    ("local", "auth.ssh_private_key", "/no/such/key", "auth.ssh_private_key: /no/such/key does"),
    ("local", "file_mounts.~/x", "/no/such/file", "file_mounts.~/x: /no/such/file does not exist"),
    ("local", "setup_commands", ["pip install 'ray[serve]==2.9.3'"], "names Ray 2.9.3, here is"),
    ("local", "setup_commands", ["python3.9 -m venv x"], "names Python 3.9, here is"),
    ("aws", "docker.run_options", ["--network=host"], "--network=host: Ray adds --net=host"),
    ("aws", "docker.image", "rayproject/ray:2.9.0-py39-gpu@sha256:1", "names Ray 2.9.0, here is"),
    ("aws", "docker.image", "rayproject/ray:2.60.0-py39-gpu@sha256:1", "names Python 3.9, here"),
    ("local", "head_start_ray_commands",
     ["ray stop", "RAY_AUTH_MODE=token ray start --head --port=6379 --autoscaling-config=x"],
     "needs RAY_enable_autoscaler_v2=0"),
    ("aws", "worker_start_ray_commands",
     ["ray stop", "ray start --address=$RAY_HEAD_IP:6379"], "has no RAY_AUTH_MODE=token"),
    ("aws", "worker_start_ray_commands",
     ["ray stop", "RAY_AUTH_MODE=token ray start --address=$RAY_HEAD_IP:6380"], "asks port 6380"),
    ("aws", "worker_start_ray_commands", ["ray stop", "RAY_AUTH_MODE=token ray start --head"],
     "worker_start_ray_commands: has no RAY_HEAD_IP"),
    ("aws", "head_start_ray_commands", ["ray stop", "RAY_AUTH_MODE=token ray start --head"],
     "head_start_ray_commands: has no --autoscaling-config"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path", "value", "told"), CONTRADICTIONS)
def test_contradictions_name_the_key(
    files: dict[str, Config], tmp_path: Path, name: str, path: str, value: Any, told: str
) -> None:
    config = files[name]
    parts = tuple(path.split("."))
    parent(config, parts)[parts[-1]] = value
    code, output = check(tmp_path, config)
    assert code == ExitCode.USAGE
    assert told in output and "Traceback" not in output, output


def test_good_files_and_bad_ones(files: dict[str, Config], tmp_path: Path) -> None:
    assert check(tmp_path, files["aws"])[0] == ExitCode.OK
    # The versions in our own image names are those of this installation.
    python = "".join(platform.python_version_tuple()[:2])
    files["aws"]["docker"]["image"] = f"rayproject/ray:{version('ray')}-py{python}-gpu"
    code, output = check(tmp_path, files["aws"])
    assert code == ExitCode.OK and "has no digest" in output
    for text, told in (("a: [", "expected"), ("just text", "must be a mapping")):
        (tmp_path / "bad.yaml").write_text(text)
        result = CliRunner().invoke(cluster, ["check", str(tmp_path / "bad.yaml")])
        assert result.exit_code == ExitCode.USAGE and told in result.output
    result = CliRunner().invoke(cluster, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == ExitCode.USAGE and "No such file" in result.output


def test_the_image_starts_as_ray_starts_it(files: dict[str, Config]) -> None:
    """Its entry point is our program; Ray wants a shell, and in it rsync and ssh."""
    docker = files["aws"]["docker"]
    name, options = docker["container_name"], docker["run_options"]
    line = docker_start_cmds("ubuntu", docker["image"], {}, name, options, "x", "/tmp", "docker")
    words = shlex.split(line)
    given = words[: words.index(docker["image"])]
    assert words[-1] == "bash" and "--entrypoint=" in given and "--user=0:0" in given
    assert [word for word in given if word.startswith("--net")] == ["--net=host"]
    dockerfile = (REPOSITORY / "deploy/docker/Dockerfile").read_text()
    assert {"rsync", "openssh-client"} <= {*re.findall(r"[\w-]+", dockerfile.split("packages=")[1])}


def test_hosts_that_do_not_answer(files: dict[str, Config], tmp_path: Path) -> None:
    # Of this machine's own block of loopback addresses: refused at once.
    files["local"]["provider"] |= {"head_ip": "127.9.9.1", "worker_ips": ["127.9.9.2", "127.9.9.3"]}
    code, output = check(tmp_path, files["local"], "--reach")
    if "127.9.9.1 does not answer" in output:  # else an sshd listens on all addresses here
        assert code == ExitCode.USAGE
        assert "provider.worker_ips[1]: 127.9.9.3 does not answer on port 22" in output
    assert check(tmp_path, files["local"])[0] == ExitCode.OK


def test_the_serve_config_is_one() -> None:
    config = shipped("serve")
    schema = ServeDeploySchema.model_validate(config)
    assert schema.http_options.port == 8000
    (application,) = schema.applications
    assert application.import_path == "expertmesh.deploy.serve_app:build_openai_app"
    settings = AppSettings.model_validate(application.args)
    # K3 on 64 GPUs, each actor on one, also when it starts before the nodes that have them.
    assert settings.mesh.actors == 64
    assert (settings.mesh.nodes_may_join, settings.mesh.gpus_per_actor) == (True, 1)
    # The same names that nodes of the cluster files offer.
    offered = {
        resource
        for kind in shipped("aws")["available_node_types"].values()
        for resource in kind["resources"]
    }
    asked = settings.mesh.resources
    assert set(asked.attention) | set(asked.experts) <= offered
