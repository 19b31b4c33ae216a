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
        self._experts, self._attention = Pace(settings.experts), Pace(settings.attention)

    def decide(self, signals: PoolSignals, now_s: float) -> Decision:
        """now_s: a monotonic clock. Logs a change it decides on, with the numbers that led to it.

        A pool whose members do not all answer stays as it is: silence is no sign of idleness.
        """
        actors, replicas = signals.expert_actors, signals.attention_replicas
        dry = self.settings.dry_run
        if signals.changing:
            self._experts.forget()
            self._attention.forget()
            return Decision(actors, replicas, "a change is under way", dry)
        experts = self._experts.follow(actors, self._want_experts(signals), now_s)
        attention = self._attention.follow(replicas, self._want_attention(signals), now_s)
        reasons = [
            _describe("expert actors", actors, experts),
            _describe("attention replicas", replicas, attention),
        ]
        reason = "; ".join(part for part in reasons if part)
        decision = Decision(experts.count, attention.count, reason, dry)
        if decision.changes(signals):
            _log.info("%s: %s", "dry run, would scale" if dry else "scaling", reason)
        return decision

    def _want_experts(self, signals: PoolSignals) -> Want:
        pool, actors, settings = signals.experts, signals.expert_actors, self.settings.experts
        if actors == 0:
            return Want(0, "")
        if pool is None or not known(pool.busy_share, pool.imbalance, pool.wait_share):
            return _unknown(actors, settings.min_actors)
        return want_experts(pool, actors, settings)

    def _want_attention(self, signals: PoolSignals) -> Want:
        pool, replicas = signals.attention, signals.attention_replicas
        settings = self.settings.attention
        if pool is None or not known(pool.occupancy, pool.queued_tokens) or replicas == 0:
            return _unknown(replicas, settings.min_replicas)
        return want_attention(pool, replicas, settings)


def _unknown(current: int, least: int) -> Want:
    """Only the least number can be asked for without asking the members."""
    return Want(max(current, least), "not all members answer")


def _describe(pool: str, now: int, then: Want) -> str:
    change = f"{now} -> {then.count}" if then.count != now else str(now)
    return f"{pool} {change}: {then.reason}" if then.reason else ""
