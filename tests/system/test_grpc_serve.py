"""`expertmesh serve --grpc-port` over a real mesh: streams live through a death and a stop."""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest

from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.deploy.grpc.test_discovery import NOT_SERVING, SERVING, Watcher
from tests.support.checkpoints import write_checkpoint
from tests.support.door import Door
from tests.support.grpc_calls import ENGINE, Answer, ask, refused
from tests.support.http_server import free_port
from tests.support.server_process import ServerProcess, server_process, wait_for

START, STOP = 240.0, 60.0
LONG = {"max_tokens": 250, "ignore_eos": True}


@dataclass
class Served:
    process: ServerProcess
    url: str
    channel: grpc.Channel

    @property
    def engine(self) -> EngineStub:
        return EngineStub(self.channel)

    def running(self) -> int:
        loads = self.engine.GetLoads(pb.GetLoadsRequest(), timeout=10).loads
        return sum(load.num_total_reqs for load in loads)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One attention and two expert actors."""
    checkpoint = write_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny",
        tokenizer=True,
        num_hidden_layers=4,
        num_experts=7,
    )
    port, grpc_port = free_port(), free_port()
    arguments = ["--port", str(port), "--grpc-port", str(grpc_port), "--name", "grpc-test"]
    with server_process(checkpoint, *arguments, "--grace-seconds", "30") as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_ready(url, START)
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            yield Served(process, url, channel)


@pytest.mark.timeout(500)
class TestServe:
    """One server for all of these, in this order: the last ones break it on purpose."""

    def test_answers_as_http_does(self, served: Served) -> None:
        with Door(served.url) as door:
            for prompt in ("hello world", [1, 2, 3]):
                want = door.text(prompt, temperature=0, max_tokens=10, ignore_eos=True)
                request = ask(prompt, max_tokens=10, ignore_eos=True)
                assert Answer(served.engine.Generate(request, timeout=60)).text() == want
        info = served.engine.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.served_model_name, info.num_experts, info.num_layers) == ("tiny", 7, 4)
        code, _, _ = refused(served.engine.Generate(ask([5000])))
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    def test_a_cancel_an_abort_and_a_deadline_reach_the_engine(self, served: Served) -> None:
        request = ask(request_id="mine", max_tokens=3000, ignore_eos=True)
        call = served.engine.Generate(request, timeout=60)
        next(call)
        wait_for(lambda: served.running() == 1, 10)
        call.cancel()
        wait_for(lambda: served.running() == 0, 10)
        call = served.engine.Generate(request, timeout=60)
        next(call)
        assert served.engine.Abort(pb.AbortRequest(request_id="mine")).aborted == 1
        assert list(call)[-1].complete.finish_reason == "abort"
        with pytest.raises(grpc.RpcError) as failed:
            list(served.engine.Generate(request, timeout=0.5))
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_for(lambda: served.running() == 0, 10)

    def test_a_dead_expert_actor_costs_no_token(self, served: Served) -> None:
        watcher = Watcher(served.channel, ENGINE)
        watcher.wait(SERVING)
        want = Answer(served.engine.Generate(ask("x", **LONG), timeout=60)).text()
        call = served.engine.Generate(ask("x", **LONG), timeout=90)
        first = next(call)
        victim = httpx.get(f"{served.url}/mesh", timeout=10).json()["experts"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        answer = Answer([first, *call])
        assert answer.text() == want
        assert answer.ends[0].completion_tokens == LONG["max_tokens"]
        assert served.engine.HealthCheck(pb.HealthCheckRequest(), timeout=10).healthy
        wait_for(lambda: watcher.states[-1] == SERVING, 30, lambda: str(watcher.states))
        assert set(watcher.states) <= {SERVING, NOT_SERVING}
        watcher.call.cancel()

    def test_a_stop_lets_streams_end(self, served: Served) -> None:
        watcher = Watcher(served.channel, ENGINE)
        watcher.wait(SERVING)
        call = served.engine.Generate(ask("x", **LONG), timeout=90)
        first = next(call)
        served.process.signal(signal.SIGTERM)
        watcher.wait(SERVING, NOT_SERVING)
        code, message, _ = refused(served.engine.Generate(ask(), timeout=10))
        assert code is grpc.StatusCode.UNAVAILABLE and "stopping" in message
        assert Answer([first, *call]).ends[0].finish_reason == "length"
        assert served.process.wait(STOP) == 0, served.process.output
        assert served.process.descendants() == {}


def test_a_taken_grpc_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import socket

    folder = write_checkpoint(tmp_path / "tiny", num_hidden_layers=2)
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        arguments = ["--port", str(free_port()), "--grpc-port", str(port)]
        with server_process(folder, *arguments) as process:
            assert process.wait(90) == 5
            assert f"port {port}" in " ".join(process.output.split())
    with server_process(folder, "--port", str(port), "--grpc-port", str(port)) as process:
        assert process.wait(90) == 2
        assert f"HTTP and gRPC cannot share port {port}" in " ".join(process.output.split())
