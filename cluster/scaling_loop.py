"""Readings for the autoscaler, and what it decides carried to the controller."""

import logging
import time
from collections.abc import Mapping

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.experts.actor import ExpertStats
from expertmesh.cluster.autoscaling.policy import Autoscaler
from expertmesh.cluster.autoscaling.settings import AutoscaleSettings
from expertmesh.cluster.autoscaling.signals import (
    AttentionSignals,
    Decision,
    ExpertSignals,
    PoolSignals,
)
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.traffic import Answers, Traffic

_log = logging.getLogger(__name__)


class ScalingLoop:
    """Turns counters into shares of the time between two readings, and decisions into wishes."""

    def __init__(
        self, settings: AutoscaleSettings, controller: Controller, traffic: Traffic
    ) -> None:
        self.settings = settings
        self._controller, self._traffic = controller, traffic
        self._autoscaler = Autoscaler(settings)
        self._before = Answers({}, {})
        self.last: Decision | None = None

    def steer(self) -> None:
        """One reading, one decision."""
        answers = self._traffic.ask()
        signals = self.read(answers)
        self._before = answers
        self.last = decision = self._autoscaler.decide(signals, time.monotonic())
        if decision.dry_run or not decision.changes(signals):
            return
        # Only what changes: somebody else may have asked for another number of the rest.
        experts = decision.experts if decision.experts != signals.expert_actors else None
        replicas = signals.attention_replicas
        attention = decision.attention if decision.attention != replicas else None
        try:
            self._controller.scale(experts, attention)
        except ScaleError as error:
            _log.warning("autoscaler: %s", error)

    def read(self, answers: Answers) -> PoolSignals:
        controller = self._controller
        with controller.lock:
            mesh, desired = controller.mesh, controller.desired()
            replicas, actors = list(mesh.attention), list(mesh.ranks.workers)
            changing = controller.changing()
            experts, slots = mesh.ranks.experts, mesh.slots
        busy = _deltas(actors, self._before.experts, answers.experts)
        expert_signals = None
        if busy is not None and all(worker in answers.replicas for worker in replicas):
            expert_signals = ExpertSignals(
                busy_share=sum(busy) / len(busy),
                imbalance=max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0,
                wait_share=_wait_share(replicas, self._before.replicas, answers.replicas),
                experts=experts,
                slots=slots,
            )
        return PoolSignals(
            expert_actors=desired["expert"],
            attention_replicas=desired["attention"],
            experts=expert_signals,
            attention=_occupancy(replicas, answers.replicas),
            changing=changing,
        )


def _deltas(
    actors: list[Worker], before: Mapping[Worker, ExpertStats], now: Mapping[Worker, ExpertStats]
) -> list[float] | None:
    """Busy share of each actor since `before`; None unless all answered both times."""
    if not actors or any(worker not in before or worker not in now for worker in actors):
        return None
    shares = []
    for worker in actors:
        old, new = before[worker], now[worker]
        seconds = new.wall_seconds - old.wall_seconds
        busy = sum(new.busy_seconds.values()) - sum(old.busy_seconds.values())
        shares.append(busy / seconds if seconds > 0 else 0.0)
    return shares


def _wait_share(
    replicas: list[Worker],
    before: Mapping[Worker, ReplicaStats],
    now: Mapping[Worker, ReplicaStats],
) -> float:
    """Of the engines' forward time, how much was spent waiting for sums; 0 without any."""
    waited = forward = 0.0
    for worker in replicas:
        old, new = before.get(worker, ReplicaStats()), now[worker]
        waited += new.combine_seconds - old.combine_seconds
        forward += new.engine.forward_seconds - old.engine.forward_seconds
    return min(1.0, waited / forward) if forward > 0 else 0.0


def _occupancy(
    replicas: list[Worker], now: Mapping[Worker, ReplicaStats]
) -> AttentionSignals | None:
    if not replicas or any(worker not in now for worker in replicas):
        return None
    engines = [now[worker].engine for worker in replicas]
    fullest = [
        max(
            1 - e.pages_free / e.pages_total if e.pages_total else 0.0,
            1 - e.slots_free / e.slots_total if e.slots_total else 0.0,
        )
        for e in engines
    ]
    return AttentionSignals(sum(fullest) / len(fullest), sum(e.waiting_tokens for e in engines))
