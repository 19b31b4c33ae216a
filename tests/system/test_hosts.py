"""Several hosts: `ray up` over ssh, experts on hosts of their own, a cable pulled, a host lost.

The hosts are network namespaces with an sshd each (tests/support/hosts.py). The head's host keeps
the control plane and the front door; its loss is the loss of the cluster, and not tried here.
The cluster file is the one that ships, with the lines changed that it says are to be changed; the
program is on the hosts already, so its setup commands find it and install nothing.
"""

import contextlib
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import openai
import pytest
import yaml

from expertmesh.deploy.exit_codes import ExitCode
from tests.support.checkpoints import write_checkpoint
from tests.support.hosts import REPOSITORY, Host, Scene, scene

PROMPTS = ("hello world", "Once upon a time", "The old house")
START = 240.0
# What a container has for shared memory unless it is given more.
SMALL = 64 << 20
# In the cluster file, and nowhere else.
NOBODY = "10.77.0.99"


class Cluster:
    """Three hosts under one Ray, a fourth that only calls, and a server on the first."""

    def __init__(self, hosts: Scene) -> None:
        self.head, self.one, self.two = (hosts.host(name) for name in ("head", "one", "two"))
        self.laptop = hosts.host("laptop", shm_bytes=SMALL)
        self.file = hosts.folder / "cluster.yaml"
        self.log = hosts.folder / "serve.log"
        self.offer(self.head, {"expertmesh_attention": 1})
        self.offer(self.one, {"expertmesh_expert": 1})
        self.offer(self.two, {"expertmesh_expert": 1, "expertmesh_attention": 1})
        (hosts.folder / "dist").mkdir()
        (hosts.folder / "token").write_text("0123456789abcdef" * 4)
        text = (REPOSITORY / "deploy/ray/local.yaml").read_text()
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        config = yaml.safe_load(text.replace("python3.11", python))
        config["provider"] |= {
            "head_ip": self.head.address,
            "worker_ips": [self.one.address, self.two.address, NOBODY],
        }
        config["max_workers"] = 3
        # Ten processes that nobody here looks at.
        config["head_start_ray_commands"][-1] += " --include-dashboard=false"
        config["auth"] = {"ssh_user": "root", "ssh_private_key": "/mnt/scene/key"}
        config["file_mounts"] = {
            "~/expertmesh-dist": "/mnt/scene/dist",
            "~/.ray/auth_token": "/mnt/scene/token",
        }
        self.file.write_text(yaml.safe_dump(config))

    @staticmethod
    def offer(host: Host, resources: dict[str, float]) -> None:
        """What `ray start` on the host will say it has."""
        script = f"echo '{json.dumps(resources)}' > ~/ray-resources.json"
        assert host.run("bash", "-c", script).returncode == 0

    def up(self) -> None:
        done = self.laptop.run("ray", "up", "--yes", "/mnt/scene/cluster.yaml", seconds=START)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        done = self.wait_for_nodes(3, START, "--model", "/mnt/scene/model")
        assert done.returncode == 0, done.stderr
        for host in (self.head, self.one, self.two):
            assert host.address in done.stderr and host.name in done.stderr

    def wait_for_nodes(
        self, nodes: int, seconds: float, *flags: str
    ) -> "subprocess.CompletedProcess[str]":
        """`expertmesh cluster wait` on the head."""
        command = ("cluster", "wait", "--nodes", str(nodes), "--timeout", str(seconds))
        return self.head.run("expertmesh", *command, *flags, seconds=seconds + 60)

    @contextlib.contextmanager
    def serving(self, *flags: str) -> Iterator["Siege"]:
        command = ("expertmesh", "serve", "/mnt/scene/model", "--address", "auto",
                   "--host", "0.0.0.0", "--expert-actors", "2", "--attention-replicas", "2",
                   "--attention-resource", "expertmesh_attention",
                   "--expert-resource", "expertmesh_expert", *flags)  # fmt: skip
        with self.log.open("w") as log:
            server = subprocess.Popen(self.head.inside(*command), stdout=log, stderr=log)
        try:
            siege = Siege(self)
            siege.wait(lambda status: status["state"] == "ready", START, server)
            yield siege
        finally:
            server.terminate()
            server.wait(60)


class Siege:
    """Clients on the laptop that ask for greedy text again and again, and the mesh's own word."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._url = f"http://{cluster.head.address}:8000/v1"
        self._operator = cluster.head.threads(1)
        self._clients = cluster.laptop.threads(len(PROMPTS))
        self._stop = threading.Event()
        self.expected: dict[str, str] = {}

    def status(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            with urllib.request.urlopen("http://127.0.0.1:8000/mesh", timeout=10) as answer:
                status: dict[str, Any] = json.load(answer)
                return status

        return self._operator.submit(ask).result(30)

    def wait(
        self,
        condition: Callable[[dict[str, Any]], bool],
        seconds: float,
        server: "subprocess.Popen[bytes] | None" = None,
    ) -> dict[str, Any]:
        end, status = time.monotonic() + seconds, {}
        while time.monotonic() < end:
            assert server is None or server.poll() is None, self._cluster.log.read_text()
            with contextlib.suppress(OSError):
                status = self.status()
                if condition(status):
                    return status
            time.sleep(0.1)
        log = self._cluster.log.read_text()
        raise AssertionError(f"not within {seconds:g} s: {json.dumps(status, indent=1)}\n{log}")

    def learn(self) -> None:
        """The undisturbed answers."""
        self.expected = dict(zip(PROMPTS, self._clients.map(self._answer, PROMPTS), strict=True))

    @contextlib.contextmanager
    def streams(self) -> Iterator[None]:
        """All prompts meanwhile, over and over. At the end none has failed and none differs."""
        running: list[Future[int]] = [self._clients.submit(self._loop, text) for text in PROMPTS]
        try:
            yield
        finally:
            self._stop.set()
        answers = [one.result(START) for one in running]
        assert all(answers), answers

    def _loop(self, prompt: str) -> int:
        count = 0
        while not self._stop.is_set():
            assert self._answer(prompt) == self.expected[prompt]
            count += 1
        return count

    def _answer(self, prompt: str) -> str:
        with openai.OpenAI(
            base_url=self._url, api_key="none", max_retries=0, timeout=100
        ) as client:
            stream = client.completions.create(
                model="model", prompt=prompt, max_tokens=120, temperature=0, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            chunks = [chunk.choices[0] for chunk in stream]
            assert chunks[-1].finish_reason == "length", chunks[-1]
            return "".join(chunk.text for chunk in chunks)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("hosts")
    write_checkpoint(folder / "model", tokenizer=True, num_hidden_layers=4, num_experts=8)
    with scene(folder) as hosts:
        cluster = Cluster(hosts)
        cluster.up()
        yield cluster


def hosts_of(status: dict[str, Any], kind: str) -> set[str]:
    return {member["host"] for member in status[kind]}


def test_what_operators_are_told(cluster: Cluster) -> None:
    checked = cluster.laptop.run("expertmesh", "cluster", "check", "/mnt/scene/cluster.yaml")
    assert checked.returncode == ExitCode.OK, checked.stderr
    # Three have joined; one is named in the file and does not exist. By an explicit address the
    # token has to be sent along.
    address = f"{cluster.head.address}:6379"
    waited = cluster.wait_for_nodes(4, 1, "--address", address)
    assert waited.returncode == ExitCode.LAUNCH, waited.stderr
    assert "3 of 4 nodes have joined within 1 s" in waited.stderr
    for host in (cluster.head, cluster.one, cluster.two):
        assert f"{host.address} ({host.name}" in waited.stderr
    started = cluster.laptop.run("expertmesh", "serve", "/mnt/scene/model", "--dry-run")
    assert started.returncode == ExitCode.OK, started.stderr
    assert f"/dev/shm has {SMALL:,} bytes free" in started.stderr


@pytest.mark.timeout(600)
def test_a_cut_cable_and_a_lost_host(cluster: Cluster) -> None:
    with cluster.serving() as siege:
        status = siege.status()
        assert hosts_of(status, "attention") == {"head", "two"}
        assert hosts_of(status, "experts") == {"one", "two"}
        siege.learn()
        with siege.streams():
            cluster.one.cut()
            status = siege.wait(lambda status: status["losses"] >= 1, 60)
            assert "one" not in hosts_of(status, "experts")
            siege.wait(lambda status: status["state"] == "ready", 120)
            cluster.one.mend()
            # The process that was cut off is no member any more; another takes its seat.
            siege.wait(lambda status: hosts_of(status, "experts") == {"one", "two"}, START)
            losses = siege.status()["losses"]
            cluster.two.kill()
            siege.wait(lambda status: status["losses"] > losses, 60)
            status = siege.wait(lambda status: status["state"] == "ready", 120)
            assert hosts_of(status, "attention") == {"head"}
            assert hosts_of(status, "experts") == {"one"}
