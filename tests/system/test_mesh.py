"""A real mesh on real Ray: the answers of one process, and failures that name who failed."""

import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray

from expertmesh.actors.attention.engine import Engine
from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams, TokenOutput
from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.model.model import Model
from expertmesh.cluster.launch import LaunchError, Mesh, Progress, start
from expertmesh.cluster.ledger.recording import load_recording
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.deploy.doctor.ray_probe import check_ray
from tests.support.checkpoints import write_checkpoint
from tests.support.local_ray import cluster

__all__ = ["cluster"]  # a fixture

ENGINE = EngineSettings(pages=64, slots=8)
DEADLINE = 2.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mesh") / "model", num_experts=7)


def settings(model: Path, **changes: Any) -> ClusterSettings:
    base = {
        "load": LoadSettings(model=model, device="cpu", expert_cache_bytes=1 << 22),
        "engine": ENGINE,
        "exchange": ExchangeSettings(deadline_s=DEADLINE),
        "name": f"t{os.getpid()}",
    }
    return ClusterSettings(**{**base, **changes})


def ask(name: str, seed: int, tokens: int = 12) -> GenerateRequest:
    prompt = [(seed * 31 + i * 7) % 300 + 1 for i in range(5 + seed)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=prompt, params=params)


class Reader:
    """One stream of an ingress, read in a thread."""

    def __init__(self, actor: Any, ingress: str) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, TokenOutput] = {}
        self.lost: Exception | None = None
        self._changed = threading.Condition()
        self._stream = actor.stream.options(num_returns="streaming").remote(ingress)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for ref in self._stream:
                outputs = msgspec.msgpack.decode(ray.get(ref), type=list[TokenOutput])
                with self._changed:
                    for output in outputs:
                        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                        if output.finish_reason is not None:
                            self.ends[output.request_id] = output
                    self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self.lost = error
                self._changed.notify_all()

    def wait(self, condition: Any, timeout: float = 30.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), timeout), "nothing came"


def submit(actor: Any, ingress: str, *requests: GenerateRequest) -> list[Any]:
    return ray.get(actor.submit.remote(ingress, msgspec.msgpack.encode(list(requests))))


def one_process(model: Path, actors: int, requests: list[GenerateRequest]) -> dict[str, list[int]]:
    """The same tokens without Ray, sockets or processes: the twin the mesh must equal."""
    opened = settings(model).load.open()
    cuts = [-(-7 * a // actors) for a in range(actors + 1)]
    banks = [
        ExpertBank(
            opened.config, opened.kernels,
            dict.fromkeys(opened.config.moe_layers, range(begin, end)), opened.source,
            dtype=opened.dtype, cache_bytes=1 << 22,
        )
        for begin, end in itertools.pairwise(cuts)
    ]  # fmt: skip
    net = Model(opened.config, opened.kernels, opened.source, dtype=opened.dtype)
    engine = Engine(
        net, net.new_state(ENGINE.pages, ENGINE.slots), LocalExchange(*banks), ENGINE,
        opened.config.eos,
    )  # fmt: skip
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


def alive(pids: list[int]) -> list[int]:
    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if running(pid)]


def pids_of(mesh: Mesh) -> list[int]:
    return [member.pid for member in mesh.epoch.members]


def test_two_replicas_answer_like_one_process(model: Path) -> None:
    seen: list[Progress] = []
    mesh = start(settings(model, attention_replicas=2, expert_actors=3), seen.append)
    try:
        assert mesh.state().state == "ready"
        assert seen and seen[-1].done == seen[-1].total > 0
        first, second = mesh.attention
        reader = Reader(first, "door")
        alone = [ask("a", 1), ask("b", 4)]
        assert submit(first, "door", *alone) == [None, None]  # the other replica only joins
        reader.wait(lambda r: len(r.ends) == 2)
        assert reader.tokens == one_process(model, 3, alone)

        other = Reader(second, "door")
        both = [ask("c", 2, 30), ask("d", 3, 20)]
        submit(first, "door", both[0])
        submit(second, "door", both[1])
        reader.wait(lambda r: "c" in r.ends)
        other.wait(lambda r: "d" in r.ends)
        want = one_process(model, 3, both)
        assert (reader.tokens["c"], other.tokens["d"]) == (want["c"], want["d"])

        refused = submit(first, "door", ask("e", 1), ask("e", 1), ask("f", 1, 10**6))
        assert [answer and (answer[0], answer[2]) for answer in refused] == [
            None,
            ("refused", "request_id"),
            ("refused", "max_tokens"),
        ]
        reader.wait(lambda r: "e" in r.ends)  # idle, or the counters would be of different steps
        replicas, experts = mesh.stats()
        assert len(replicas) == 2 and len(experts) == 3
        sent = sum(replica.rows_sent for replica in replicas)
        assert sum(sum(expert.rows.values()) for expert in experts) == sent
        routed = [replica.routing for replica in replicas]
        rows = {"a": 6 + 11, "b": 9 + 11, "c": 7 + 29, "d": 8 + 19, "e": 6 + 11}
        assert all(snapshot is not None for snapshot in routed)
        for hits_E in sum(snapshot.hits_LE() for snapshot in routed if snapshot is not None):
            # Every row counted once, whatever the number of ranks: joined steps count nothing.
            assert hits_E.sum() == 2 * sum(rows.values())

        mesh.upkeep.traffic.close_window()
        told = mesh.upkeep.traffic.stats(mesh.upkeep.mover.moves)
        assert [load.seat for load in told.actors] == ["expert-0", "expert-1", "expert-2"]
        assert all(load.up and load.rows > 0 for load in told.actors)
        assert sum(load.rows for load in told.actors) == sum(r.rows_sent for r in told.replicas)
        report = mesh.upkeep.traffic.report()
        assert len(report["layers"]) == len(mesh.epoch.placement.held)
        assert 1.0 <= report["fan_out"] <= 2.0

        later = Reader(first, "door")  # takes over from `reader`
        submit(first, "door", ask("g", 1))
        later.wait(lambda r: "g" in r.ends)
        assert "g" not in reader.tokens

        with ThreadPoolExecutor(1) as pool:
            recorded = pool.submit(mesh.recorder.record, 20.0, 10)
            submit(first, "door", ask("h", 1))
            recording = load_recording(BytesIO(recorded.result(30)))
        assert len(recording.trace_NLK) == 10 and (recording.hits_LE.sum(1) >= 20).all()
    finally:
        pids = pids_of(mesh)
        mesh.stop()
    assert alive(pids) == []
    assert mesh.state().state == "stopped"


def test_without_an_expert_tier_a_killed_replica_is_replaced(model: Path) -> None:
    mesh = start(settings(model, expert_actors=0))
    try:
        reader = Reader(mesh.attention[0], "door")
        submit(mesh.attention[0], "door", ask("a", 1))
        reader.wait(lambda r: "a" in r.ends)
        assert reader.tokens == one_process(model, 1, [ask("a", 1)])
        os.kill(mesh.epoch.attention[0].pid, signal.SIGKILL)
        reader.wait(lambda r: r.lost is not None)
        state = mesh.wait_state("unserviceable", timeout=10)
        assert state.state == "unserviceable" and "no attention replica is left" in state.reason
        assert mesh.wait_state("ready", timeout=60).state == "ready"
        again = Reader(mesh.attention[0], "door")
        submit(mesh.attention[0], "door", ask("a", 1))
        again.wait(lambda r: "a" in r.ends)
        assert again.tokens == reader.tokens
    finally:
        mesh.stop()


def test_a_mesh_that_cannot_be_is_refused_and_leaves_nothing(model: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"8 expert actors cannot share 7 experts.*1 to 7"):
        start(settings(model, expert_actors=8))
    with pytest.raises(LaunchError, match="need 1001 Ray CPU slots"):
        start(settings(model, expert_actors=1, cpus_per_actor=500.5))
    broken = write_checkpoint(tmp_path / "broken", num_experts=7)
    shard = sorted(broken.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(LaunchError, match=shard.name):
        start(settings(broken))
    with pytest.raises(LaunchError, match="slots_per_actor 2: 3 expert actors need at least 3"):
        start(settings(model, expert_actors=3, slots_per_actor=2))
    left = [name for name in ray.util.list_named_actors() if name.startswith(f"t{os.getpid()}")]
    assert left == []


def test_the_doctor_lists_the_nodes_of_a_cluster() -> None:
    answers, *nodes = check_ray(ray.get_runtime_context().gcs_address)
    assert answers.status == "ok" and answers.value.startswith(f"{len(nodes)} nodes alive")
    assert all(one.status == "ok" and "CPU" in one.value for one in nodes) and nodes
