"""The autoscaler: what the two pools want, at their pace, as a decision."""

import logging

from expertmesh.cluster.autoscaling.pace import Pace
from expertmesh.cluster.autoscaling.settings import AutoscaleSettings
from expertmesh.cluster.autoscaling.signals import Decision, PoolSignals, Want, known
from expertmesh.cluster.autoscaling.wants import want_attention, want_experts

_log = logging.getLogger(__name__)


class Autoscaler:
    """Not thread-safe: one caller, about every period_s."""

    def __init__(self, settings: AutoscaleSettings) -> None:
        self.settings = settings
        self._experts = None if settings.experts is None else Pace(settings.experts)
        self._attention = None if settings.attention is None else Pace(settings.attention)

    def decide(self, signals: PoolSignals, now_s: float) -> Decision:
        """now_s: a monotonic clock. Logs a change it decides on, with the numbers that led to it.

        A pool whose members do not all answer stays as it is: silence is no sign of idleness.
        """
        actors, replicas = signals.expert_actors, signals.attention_replicas
        dry = self.settings.dry_run
        if signals.changing:
            for pace in (self._experts, self._attention):
                if pace is not None:
                    pace.forget()
            return Decision(actors, replicas, "a change is under way", dry)
        experts, attention = Want(actors, ""), Want(replicas, "")
        if self._experts is not None and actors:
            experts = self._experts.follow(actors, _want_experts(signals, self.settings), now_s)
        if self._attention is not None:
            want = _want_attention(signals, self.settings)
            attention = self._attention.follow(replicas, want, now_s)
        reasons = [
            _describe("expert actors", actors, experts),
            _describe("attention replicas", replicas, attention),
        ]
        reason = "; ".join(part for part in reasons if part)
        decision = Decision(experts.count, attention.count, reason, dry)
        if decision.changes(signals):
            _log.info("%s: %s", "dry run, would scale" if dry else "scaling", reason)
        return decision


def _want_experts(signals: PoolSignals, settings: AutoscaleSettings) -> Want:
    pool, actors, scaling = signals.experts, signals.expert_actors, settings.experts
    assert scaling is not None
    if pool is None or not known(pool.busy_share, pool.imbalance, pool.wait_share):
        return _unknown(actors, scaling.min_actors)
    return want_experts(pool, actors, scaling)


def _want_attention(signals: PoolSignals, settings: AutoscaleSettings) -> Want:
    pool, replicas, scaling = signals.attention, signals.attention_replicas, settings.attention
    assert scaling is not None
    if pool is None or not known(pool.occupancy, pool.queued_tokens) or replicas == 0:
        return _unknown(replicas, scaling.min_replicas)
    return want_attention(pool, replicas, scaling)


def _unknown(current: int, least: int) -> Want:
    """Only the least number can be asked for without asking the members."""
    return Want(max(current, least), "not all members answer")


def _describe(pool: str, now: int, then: Want) -> str:
    change = f"{now} -> {then.count}" if then.count != now else str(now)
    return f"{pool} {change}: {then.reason}" if then.reason else ""
