"""What flows through a mesh: counters of all workers, their ledger, and recordings of it."""

import contextlib
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.exchange.counting import RoutingSnapshot, Trace
from expertmesh.actors.experts.actor import ExpertStats
from expertmesh.actors.model.config import ModelConfig
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.ledger.alarms import Alarm
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.recording import assemble
from expertmesh.cluster.ledger.stats import ActorLoad, MeshStats, ReplicaLoad
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.mover import Moves

STATS_S = 2.0
LOOK_S = 0.1


class Answers(NamedTuple):
    """Statistics of the workers that answered in time."""

    replicas: dict[Worker, ReplicaStats]
    experts: dict[Worker, ExpertStats]


class Traffic:
    """Any thread may call; the ledger guards itself."""

    def __init__(self, config: ModelConfig, controller: Controller, model: str = "") -> None:
        self._controller, self._model, self._top_k = controller, model, config.experts_per_token
        self.ledger = Ledger(config.moe_layers, config.num_experts, config.experts_per_token)

    def ask(self, timeout: float = STATS_S) -> Answers:
        workers = self._controller.mesh.workers
        calls = [worker.handle.stats.remote() for worker in workers]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout)
        answers = Answers({}, {})
        for worker, call in zip(workers, calls, strict=True):
            with contextlib.suppress(RayError):
                answer = ray.get(call, timeout=0)
                if worker.kind == "attention":
                    stats = msgspec.msgpack.decode(answer, type=ReplicaStats)
                    answers.replicas[worker] = stats
                else:
                    answers.experts[worker] = answer
        return answers

    def close_window(self) -> tuple[Answers, list[Alarm]]:
        """Takes the counters into the ledger; the loads are the controller's from now on."""
        answers, ledger = self.ask(), self.ledger
        for replica in answers.replicas.values():
            if replica.routing is not None:
                ledger.add(replica.routing, rows_sent=replica.rows_sent)
        for worker, stats in answers.experts.items():
            ledger.add_actor(worker.seat, stats.rows, stats.busy_seconds)
        alarms = ledger.close_window()
        self._controller.loads = dict(zip(ledger.layers, ledger.loads(), strict=True))
        return answers, alarms

    def loads(self, least_tokens: int) -> NDArray[np.float64]:
        """Hits [L, E] of the decayed windows; all alike until that many tokens were counted."""
        loads = self.ledger.loads()
        if loads.sum() < least_tokens * len(loads) * self._top_k:
            return np.ones_like(loads)
        return loads

    def report(self) -> dict[str, Any]:
        placement = self._controller.mesh.ranks.placement
        report: dict[str, Any] = msgspec.to_builtins(self.ledger.report(placement, self._model))
        return report

    def stats(self, moves: Moves) -> MeshStats:
        """For the exporter of /metrics."""
        controller, answers = self._controller, self.ask()
        epoch = controller.mesh.epoch
        ago = None if moves.finished_at is None else time.monotonic() - moves.finished_at
        return MeshStats(
            epoch=epoch.number,
            routing_version=epoch.version,
            failovers=controller.counts.failovers,
            rebalances={"done": moves.plans, "failed": moves.failed},
            last_rebalance=None if ago is None else time.time() - ago,
            moved_experts=moves.copies,
            moved_bytes=sum(s.moved_bytes for s in answers.experts.values()) // 2,
            checksum_failures=sum(s.checksum_failures for s in answers.experts.values()),
            held_requests=sum(
                s.engine.running + s.engine.waiting
                for s in answers.replicas.values()
                if s.held_seconds
            ),
            actors=[
                ActorLoad(w.seat, sum(s.rows.values()), sum(s.busy_seconds.values()))
                for w, s in answers.experts.items()
            ],
            replicas=[
                ReplicaLoad(
                    seat=w.seat,
                    rows_sent=s.rows_sent,
                    routed_rows=0 if s.routing is None else _routed_rows(s.routing),
                    dispatch_seconds=s.dispatch_seconds,
                    combine_seconds=s.combine_seconds,
                )
                for w, s in answers.replicas.items()
            ],
            routing=self.ledger.routing_stats(controller.mesh.ranks.placement),
        )

    def record(self, seconds: float, tokens: int) -> bytes:
        """Which experts whole tokens choose, until `tokens` are recorded or the time is over: an
        .npz as cluster/ledger/recording.py describes it."""
        before, began = self.ask(), time.monotonic()
        workers = list(before.replicas)
        share = -(-tokens // max(1, len(workers)))
        ray.get([w.handle.start_recording.remote(share) for w in workers], timeout=STATS_S)
        while time.monotonic() - began < seconds:
            time.sleep(LOOK_S)
            counts = ray.get([w.handle.recorded.remote() for w in workers], timeout=STATS_S)
            if sum(counts) >= tokens:
                break
        answers = ray.get([w.handle.stop_recording.remote() for w in workers], timeout=STATS_S)
        traces = [msgspec.msgpack.decode(answer, type=Trace) for answer in answers]
        placement = self._controller.mesh.ranks.placement
        return assemble(
            _snapshots(before),
            _snapshots(self.ask()),
            traces,
            placement if placement.held else None,
            time.monotonic() - began,
            tokens=tokens,
            model=self._model,
        ).to_bytes()


def _routed_rows(snapshot: RoutingSnapshot) -> int:
    return int(snapshot.hits_LE().sum()) // snapshot.top_k


def _snapshots(answers: Answers) -> list[RoutingSnapshot]:
    return [stats.routing for stats in answers.replicas.values() if stats.routing is not None]
