"""Every panel of the dashboards against a real Prometheus that has scraped a real server.

    python -m tests.system.dashboards --seconds 120

starts a mesh with the bundled model, loads it for so long (with one rebalance, mistakes, clients
that leave, and the loss of an expert actor), and prints what each panel's queries return.
"""

import argparse
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import grpc
import httpx

from expertmesh.deploy.observability.generate import BOARDS, FOLDER
from expertmesh.deploy.observability.panels import Panel
from expertmesh.deploy.rpc.v1 import engine_pb2, engine_pb2_grpc
from tests.support.grpc_calls import ask
from tests.support.http_server import free_port
from tests.support.mixed_load import mixed_load
from tests.support.prometheus import Prometheus, prometheus
from tests.support.promql import filled
from tests.support.server_process import server_process

START_S = 240.0
RULES = FOLDER / "expertmesh-rules.yaml"
LONG = [n % 250 for n in range(200)]
INTERVAL = "10s"  # of rates, with a scrape a second


class Server(NamedTuple):
    url: str
    grpc_port: int
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}


class Shown(NamedTuple):
    """series: how many each of the panel's queries returns."""

    board: str
    panel: Panel
    series: list[int]

    @property
    def empty(self) -> bool:
        return 0 in self.series


@contextmanager
def serving(replicas: int = 2) -> Iterator[Server]:
    """Two expert actors with a spare slot each, keys, a gRPC port, and a folder for state."""
    server = Server(f"http://127.0.0.1:{free_port()}", free_port(), secrets.token_hex(16))
    os.environ["EXPERTMESH_API_KEYS"] = server.key
    folder = tempfile.mkdtemp(prefix="expertmesh-state-")
    try:
        process = server_process(
            "--port", server.url.rpartition(":")[2], "--grpc-port", str(server.grpc_port),
            "--expert-actors", "2", "--attention-replicas", str(replicas),
            "--slots-per-actor", "9", "--name", f"panels-{os.getpid()}",
            "--state-dir", folder, "--state-dir-gb", "1",
        )  # fmt: skip
        with process as running:
            running.wait_ready(server.url, START_S)
            yield server
    finally:
        del os.environ["EXPERTMESH_API_KEYS"]
        shutil.rmtree(folder, ignore_errors=True)


def load(server: Server, seconds: float, lose_one: bool = False) -> None:
    """For so long. With a rebalance in the middle, a wrong key, and the engine protocol.
    lose_one: an expert actor is killed half way."""
    end = time.monotonic() + seconds
    with mixed_load(server.url, key=server.key):
        call_grpc(server)
        time.sleep(max(0.0, end - time.monotonic()) / 2)
        httpx.post(f"{server.url}/mesh/rebalance", headers=server.headers, timeout=60)
        httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer wrong"})
        if lose_one:
            mesh = httpx.get(f"{server.url}/mesh", headers=server.headers, timeout=30).json()
            os.kill(mesh["experts"][0]["pid"], signal.SIGKILL)
        time.sleep(max(0.0, end - time.monotonic()))


def call_grpc(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = engine_pb2_grpc.EngineStub(channel)
        metadata = (("authorization", f"Bearer {server.key}"),)
        stub.GetModelInfo(engine_pb2.GetModelInfoRequest(), metadata=metadata, timeout=30)
        # The second time from the cache, which has put the pages of the first into its tiers.
        for prompt in ("hello", LONG, LONG):
            list(stub.Generate(ask(prompt, max_tokens=4), metadata=metadata, timeout=60))


def shown(scraped: Prometheus) -> list[Shown]:
    """What every panel shows now, with all variables on "All"."""
    return [
        Shown(
            board.uid,
            panel,
            [len(scraped.query(filled(one.expr, ".*", INTERVAL))) for one in panel.targets],
        )
        for board in BOARDS
        for panel in board.panels
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.system.dashboards")
    parser.add_argument("--seconds", type=float, default=120.0)
    seconds = parser.parse_args().seconds
    with serving() as server, prometheus(server.url, RULES, server.key) as scraped:
        load(server, seconds, lose_one=True)
        results = shown(scraped)
        firing, errors = scraped.firing(), scraped.rule_errors()
    for board, panel, series in results:
        mark = "EMPTY" if 0 in series else "ok"
        reason = f"  ({panel.may_be_empty})" if panel.may_be_empty else ""
        print(f"{mark:6} {board:20} {panel.title:35} {series}{reason}")
    unexpected = [one for one in results if one.empty and not one.panel.may_be_empty]
    print(f"{len(results)} panels, {len(unexpected)} empty without a reason")
    print(f"alerts that fire: {sorted(firing) or 'none'}; rules that fail: {errors or 'none'}")
    return 1 if unexpected or errors else 0


if __name__ == "__main__":
    sys.exit(main())
