"""What the autoscaler is told, and what it answers."""

import math
from dataclasses import dataclass

from expertmesh.actors.attention.messages import EngineStats


@dataclass(frozen=True, slots=True)
class ExpertSignals:
    """The expert pool since the last reading.

    busy_share: computing seconds over wall seconds, 0 to 1, mean over the actors.
    imbalance: largest over mean load of the actors, after balancing; 1 without load.
    wait_share: share of the engines' step time that they wait for experts, 0 to 1.
    experts, slots: routed experts and slots per actor, both of one layer.
    """

    busy_share: float
    imbalance: float
    wait_share: float
    experts: int
    slots: int


@dataclass(frozen=True, slots=True)
class AttentionSignals:
    """The attention replicas now.

    occupancy: KV pages or state slots in use, whichever is fuller, 0 to 1, mean over the replicas.
    queued_tokens: prompt tokens that wait to be computed, over all replicas and front doors.
    """

    occupancy: float
    queued_tokens: float


@dataclass(frozen=True, slots=True)
class PoolSignals:
    """One reading. A pool's part is None unless all its members answered.

    expert_actors: 0 where the experts live with the attention half; nothing is decided for them.
    changing: a change is under way, so the counts are not what was asked for yet.
    """

    expert_actors: int
    attention_replicas: int
    experts: ExpertSignals | None
    attention: AttentionSignals | None
    changing: bool = False


@dataclass(frozen=True, slots=True)
class Want:
    """What a pool's numbers alone ask for. reason: says which number, its value and its limit."""

    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Target counts. Not to be acted upon in a dry run."""

    experts: int
    attention: int
    reason: str
    dry_run: bool = False

    def changes(self, signals: PoolSignals) -> bool:
        now = signals.expert_actors, signals.attention_replicas
        return (self.experts, self.attention) != now


def known(*values: float) -> bool:
    """False when a value is NaN or infinite: a division by no time or no members."""
    return all(math.isfinite(value) for value in values)


def occupancy(engine: EngineStats) -> float:
    """Share of an engine's KV pages or state slots in use, whichever is larger; 0 without any."""
    pages = 1 - engine.pages_free / engine.pages_total if engine.pages_total else 0.0
    slots = 1 - engine.slots_free / engine.slots_total if engine.slots_total else 0.0
    return max(pages, slots)
