"""What flows through a mesh: the counters of all workers, and the ledger they go into."""

import contextlib
import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayError

from expertmesh.actors.attention.actor import ReplicaStats, replica_stats
from expertmesh.actors.exchange.counting import RoutingSnapshot
from expertmesh.actors.experts.actor import ExpertStats
from expertmesh.actors.model.config import ModelConfig
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.ledger.alarms import Alarm
from expertmesh.cluster.ledger.ledger import Ledger
from expertmesh.cluster.ledger.stats import ActorLoad, MeshStats, ReplicaLoad
from expertmesh.cluster.ledger.totals import Total
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.mover import Moves
from expertmesh.cluster.placement import Placement

STATS_S = 2.0


class Answers(NamedTuple):
    """Statistics of the workers that answered in time."""

    replicas: dict[Worker, ReplicaStats]
    experts: dict[Worker, ExpertStats]


class Traffic:
    """Any thread may call; the ledger guards itself."""

    def __init__(self, config: ModelConfig, controller: Controller, model: str = "") -> None:
        self._controller, self._model, self._top_k = controller, model, config.experts_per_token
        self.ledger = Ledger(config.moe_layers, config.num_experts, config.experts_per_token)
        self._moved_bytes, self._checksum_failures = Total(), Total()
        self._overview: tuple[tuple[int, int, int] | None, bytes] = None, b""

    @property
    def placement(self) -> Placement | None:
        """None without an expert tier."""
        placement = self._controller.mesh.ranks.placement
        return placement if placement.held else None

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
                    answers.replicas[worker] = replica_stats(answer)
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
        ledger.keep_actors({w.seat for w in self._controller.mesh.ranks.workers})
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
        report = self.ledger.report(self.placement, self._model)
        plain: dict[str, Any] = msgspec.to_builtins(report)
        return plain

    def overview(self) -> bytes:
        """ledger.Overview as msgpack, for the dashboard page; made once per window and routing."""
        mesh = self._controller.mesh
        epoch, seats = mesh.epoch, {worker.member: worker.seat for worker in mesh.workers}
        version = self.ledger.windows, epoch.number, epoch.version
        if version == self._overview[0]:
            return self._overview[1]
        placement = epoch.placement if epoch.placement.held else None
        names = [seats.get(member, member.name) for member in epoch.experts]
        packed = msgspec.msgpack.encode(self.ledger.overview(placement, names))
        self._overview = version, packed
        return packed

    def stats(self, moves: Moves) -> MeshStats:
        """For the exporter of /metrics."""
        controller, answers = self._controller, self.ask()
        epoch, counts, desired = controller.mesh.epoch, controller.counts, controller.desired()
        ago = None if moves.finished_at is None else time.monotonic() - moves.finished_at
        return MeshStats(
            state=controller.status.state,
            epoch=epoch.number,
            routing_version=epoch.version,
            members={
                kind: sum(w.kind == kind for w in controller.mesh.workers) for kind in desired
            },
            desired={str(kind): number for kind, number in desired.items()},
            losses=counts.losses,
            joins=counts.joins,
            failed_joins=counts.failed_joins,
            failovers=counts.failovers,
            last_recovery=counts.recovery_s if counts.failovers else None,
            rebalancing=moves.running,
            rebalances={"done": moves.plans, "failed": moves.failed},
            last_rebalance=None if ago is None else time.time() - ago,
            moved_experts=moves.copies,
            # Counted where it leaves and where it arrives.
            moved_bytes=self._moved_bytes.update(
                {w.member.name: s.moved_bytes for w, s in answers.experts.items()}
            )
            // 2,
            checksum_failures=self._checksum_failures.update(
                {w.member.name: s.checksum_failures for w, s in answers.experts.items()}
            ),
            held_requests=sum(
                s.engine.running + s.engine.waiting
                for s in answers.replicas.values()
                if s.held_seconds
            ),
            actors=[
                _actor_load(worker.seat, answers.experts.get(worker))
                for worker in controller.mesh.ranks.workers
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
            routing=self.ledger.routing_stats(self.placement),
        )


def _actor_load(seat: str, stats: ExpertStats | None) -> ActorLoad:
    if stats is None or stats.failed is not None:
        return ActorLoad(seat, up=False)
    return ActorLoad(
        seat,
        sum(stats.rows.values()),
        sum(stats.busy_seconds.values()),
        weight_bytes=stats.packed_bytes,
        cache_bytes=stats.cached_bytes,
    )


def snapshots(answers: Answers) -> list[RoutingSnapshot]:
    return [stats.routing for stats in answers.replicas.values() if stats.routing is not None]


def _routed_rows(snapshot: RoutingSnapshot) -> int:
    return int(snapshot.hits_LE().sum()) // snapshot.top_k
