"""The chart's pods, one network namespace each, under the commands and probes that it renders.

What KubeRay does is done here: `ray start` with the group's parameters in each pod, and the Serve
configuration put to the head's dashboard. Its operator and a kubelet are not at hand.
"""

import contextlib
import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helm.chart import (
    CHART,
    Objects,
    app_arguments,
    container,
    groups,
    render,
    serve_config,
    service,
)
from tests.support.hosts import REPOSITORY, Host, Scene, scene
from tests.support.server_process import wait_for

START = 240.0
# Ray gives its processes 30 s, which a busy machine may need more than once; a kubelet starts anew.
ATTEMPTS = 3
TOKEN = "em-admin-of-this-test"
RAY_TOKEN = "0123456789abcdef" * 4  # KubeRay makes one per cluster
MODELS = "/opt/expertmesh/models"


def chart() -> Objects:
    return render(
        CHART / "ci" / "kind-nano-values.yaml",
        **{
            "attention.replicas": 1,
            "experts.replicas": 1,
            "experts.actorsPerPod": 2,
            "auth.adminToken.value": TOKEN,
            "grpc.enabled": True,
            "mesh": {"engine": {"pages": 64, "slots": 4}, "threads_per_actor": 1},
        },
    )


class Pods:
    """One pod of each group."""

    def __init__(self, hosts: Scene, objects: Objects) -> None:
        self.objects = objects
        self.hosts = {name: hosts.host(name) for name in groups(objects)}
        self.client = hosts.host("client").threads(4)
        self.start("head")
        with ThreadPoolExecutor() as together:
            list(together.map(self.start, [name for name in self.hosts if name != "head"]))

    def start(self, name: str) -> None:
        """The bundled model where the image has it, a root that is read-only, and Ray."""
        host = self.hosts[name]
        link = shlex.quote(str(REPOSITORY / "deploy" / "models"))
        prepare = (
            f"mount -t tmpfs tmpfs /opt && mkdir -p /opt/expertmesh && ln -s {link} {MODELS} && "
            "mount -o remount,bind,ro /"
        )
        done = host.run("bash", "-c", prepare)
        assert done.returncode == 0, done.stderr
        start = [*self.environment(name), "bash", "-c", self.command(name)]
        for _ in range(ATTEMPTS):
            done = host.run(*start, seconds=START)
            if done.returncode == 0:
                return
            host.run("ray", "stop", "--force")  # of the processes that this host sees, its own
        raise AssertionError(done.stdout + done.stderr)

    def environment(self, name: str) -> list[str]:
        given = [
            f"{e['name']}={e['value']}"
            for e in container(self.objects, name)["env"]
            if "value" in e
        ]
        return ["env", *given, f"EXPERTMESH_ADMIN_TOKEN={TOKEN}", *self.ray_token()]

    def ray_token(self) -> list[str]:
        """What KubeRay adds to the environment."""
        mode = service(self.objects)["rayClusterConfig"]["authOptions"]["mode"]
        assert mode == "token"
        return [f"RAY_AUTH_MODE={mode}", f"RAY_AUTH_TOKEN={RAY_TOKEN}"]

    def command(self, name: str) -> str:
        """As KubeRay writes it, without --block."""
        flags = [
            f"--{key}" if value == "true" else f"--{key}={value}"
            for key, value in groups(self.objects)[name]["rayStartParams"].items()
        ]
        where = "--head" if name == "head" else f"--address={self.hosts['head'].address}:6379"
        return " ".join(["ray start", where, *flags])

    def get(self, name: str, port: int, path: str) -> int:
        """Status of a GET from outside the pod; 0 without an answer."""

        def ask() -> int:
            url = f"http://{self.hosts[name].address}:{port}{path}"
            try:
                with urllib.request.urlopen(url, timeout=10) as answer:
                    return int(answer.status)
            except urllib.error.HTTPError as error:
                return error.code
            except OSError:
                return 0

        return self.client.submit(ask).result(30)

    def probe(self, name: str, kind: str) -> bool:
        """What a kubelet would find."""
        first = container(self.objects, name)
        ports = {port["name"]: port["containerPort"] for port in first["ports"]}
        target = first[f"{kind}Probe"]["httpGet"]
        return self.get(name, ports[target["port"]], target["path"]) == 200

    def deploy(self) -> None:
        body = json.dumps(serve_config(self.objects)).encode()

        def put() -> int:
            url = f"http://{self.hosts['head'].address}:8265/api/serve/applications/"
            headers = {"content-type": "application/json", "authorization": f"Bearer {RAY_TOKEN}"}
            request = urllib.request.Request(url, body, headers, method="PUT")
            with urllib.request.urlopen(request, timeout=60) as answer:
                return int(answer.status)

        assert self.client.submit(put).result(90) == 200

    def logs(self) -> str:
        lines = "tail -n 20 /tmp/ray/session_latest/logs/serve/* 2>/dev/null"
        return "\n".join(host.run("bash", "-c", lines).stdout for host in self.hosts.values())


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with scene(tmp_path_factory.mktemp("pods")) as hosts:
        started = Pods(hosts, chart())
        with contextlib.ExitStack() as stack:
            stack.callback(started.client.shutdown)
            yield started


@pytest.mark.timeout(600)
def test_pods_become_ready_in_the_order_of_their_probes(pods: Pods) -> None:
    for name in pods.hosts:
        if name != "front-door":
            assert pods.probe(name, "startup") and pods.probe(name, "readiness"), name
    pods.deploy()
    wait_for(lambda: pods.probe("front-door", "startup"), START, pods.logs)
    wait_for(lambda: pods.probe("front-door", "readiness"), START, pods.logs)
    assert pods.probe("front-door", "liveness")


def test_every_process_runs_in_its_own_group(pods: Pods) -> None:
    def status() -> dict[str, Any]:
        url = f"http://{pods.hosts['front-door'].address}:8000/mesh"
        answer = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=30)
        body: dict[str, Any] = answer.raise_for_status().json()
        return body

    members = pods.client.submit(status).result(60)
    wanted = app_arguments(pods.objects)["mesh"]
    assert [m["host"] for m in members["attention"]] == ["attention"]
    assert [m["host"] for m in members["experts"]] == ["experts"] * wanted["expert_actors"]
    assert running(pods.hosts["head"], "ray::MeshKeeper") and running(
        pods.hosts["head"], "ServeReplica:expertmesh:mesh"
    )
    assert running(pods.hosts["front-door"], "ServeReplica:expertmesh:openai")
    for name in ("attention", "experts"):
        assert not running(pods.hosts[name], "ServeReplica:expertmesh:(mesh|openai)")


def running(host: Host, pattern: str) -> bool:
    return (
        host.run(
            "bash", "-c", f"ps ax -o args | grep -E '^ray::.*' | grep -qE '{pattern}'"
        ).returncode
        == 0
    )


def test_grpc_answers_on_its_own_port(pods: Pods) -> None:
    ask = (
        "import grpc; from grpc_health.v1.health_pb2 import HealthCheckRequest as Request; "
        "from grpc_health.v1.health_pb2_grpc import HealthStub; "
        f"channel = grpc.insecure_channel('{pods.hosts['front-door'].address}:50051'); "
        "print(HealthStub(channel).Check(Request(), timeout=30).status)"
    )
    done = pods.hosts["attention"].run("python", "-c", ask)
    assert (done.stdout.strip(), done.returncode) == ("1", 0), done.stderr  # SERVING


def test_a_front_door_that_leaves_lets_its_stream_finish(pods: Pods) -> None:
    door = pods.hosts["front-door"]
    body = {
        "model": "nano",
        "prompt": "Once",
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    hook = container(pods.objects, "front-door")["lifecycle"]["preStop"]["exec"]["command"]
    script, file, _, _, *ports = hook[1:]
    assert script.endswith("/drain.sh")
    drain = ["bash", str(CHART / "files" / "drain.sh"), file, "0", "600", *ports]

    def stream() -> tuple[bool, str, str]:
        """Whether the hook waited for the stream, how that ended, and what came after it."""
        base = f"http://{door.address}:8000"
        with httpx.Client(base_url=base, timeout=120) as client:
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                process = subprocess.Popen(door.inside(*drain))
                text = [line for line in lines if line]
                waited = process.poll() is None
            after = client.post("/v1/completions", json=body | {"stream": False, "max_tokens": 1})
            assert after.status_code == 200
        assert process.wait(60) == 0
        return waited, text[-1], after.headers["connection"]

    waited, last, connection = pods.client.submit(stream).result(200)
    assert (waited, last, connection) == (True, "data: [DONE]", "close")
    assert pods.get("front-door", 8000, "/ready") == 503
    assert pods.get("front-door", 8000, "/health") == 200
    assert door.run("rm", file).returncode == 0
    wait_for(lambda: pods.get("front-door", 8000, "/ready") == 200, 30)
