"""What the autoscaler may do, and when. Frozen; unknown keys are refused by name."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PaceSettings(BaseModel):
    """How soon a pool follows what it wants. Growing is fast and shrinking slow: too small a pool
    costs requests, too large a one only money."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    up_delay_s: float = Field(
        default=3.0,
        ge=0,
        description="The pool grows after wanting to for so long without a break.",
    )
    down_delay_s: float = Field(
        default=120.0,
        ge=0,
        description="The pool shrinks after wanting to for so long without a break. Longer than "
        "the period of a load that comes and goes.",
    )
    up_cooldown_s: float = Field(
        default=10.0, ge=0, description="Between a change of the pool and its next growth."
    )
    down_cooldown_s: float = Field(
        default=60.0, ge=0, description="Between a change of the pool and its next shrinking."
    )
    max_step_up: int = Field(
        default=2, ge=1, description="Members added at once. Removed is one at a time."
    )


class ExpertScaling(PaceSettings):
    """Limits of the expert pool."""

    min_actors: int = Field(default=1, ge=1, description="Never fewer expert actors.")
    max_actors: int = Field(default=8, ge=1, description="Never more expert actors.")
    high_busy_share: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Grow when the busiest actor computes for a larger share of the time.",
    )
    low_busy_share: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="Shrink when one actor fewer would still be busy for a smaller share.",
    )
    high_wait_share: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Grow when engines wait for experts for a larger share of their steps, unless "
        "the experts idle (low_busy_share): then the wire is slow, not they.",
    )
    max_imbalance: float = Field(
        default=1.5,
        ge=1,
        description="Grow, for more spare slots, when balancing cannot bring the busiest actor "
        "below so many times the mean.",
    )
    spare_actors: int = Field(
        default=1,
        ge=0,
        description="Actors that may be lost with every expert still having a slot.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_actors > self.max_actors:
            raise ValueError(f"min_actors {self.min_actors} exceeds max_actors {self.max_actors}")
        if self.low_busy_share >= self.high_busy_share:
            raise ValueError(
                f"low_busy_share {self.low_busy_share:g} must be below high_busy_share "
                f"{self.high_busy_share:g}, or the pool would never come to rest"
            )
        return self


class AttentionScaling(PaceSettings):
    """Limits of the attention replicas."""

    min_replicas: int = Field(
        default=1,
        ge=1,
        description="Never fewer attention replicas. One holds the model ready: with none, the "
        "first request would wait for a load of the weights.",
    )
    max_replicas: int = Field(default=4, ge=1, description="Never more attention replicas.")
    high_occupancy: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="Grow when a larger share of the KV pages or state slots is in use, mean "
        "over the replicas.",
    )
    low_occupancy: float = Field(
        default=0.4,
        ge=0,
        lt=1,
        description="Shrink when one replica fewer would still use a smaller share.",
    )
    high_queued_tokens: int = Field(
        default=4096,
        ge=1,
        description="Grow when more prompt tokens wait per replica to be computed.",
    )
    low_queued_tokens: int = Field(
        default=512,
        ge=0,
        description="Shrink only while fewer tokens would wait per replica with one fewer.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas {self.min_replicas} exceeds max_replicas {self.max_replicas}"
            )
        for low, high, name in (
            (self.low_occupancy, self.high_occupancy, "occupancy"),
            (self.low_queued_tokens, self.high_queued_tokens, "queued_tokens"),
        ):
            if low >= high:
                raise ValueError(
                    f"low_{name} {low:g} must be below high_{name} {high:g}, or the pool would "
                    "never come to rest"
                )
        return self


class AutoscaleSettings(BaseModel):
    """The whole autoscaler."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    experts: ExpertScaling | None = Field(
        default_factory=ExpertScaling, description="None: their number is left alone."
    )
    attention: AttentionScaling | None = Field(
        default_factory=AttentionScaling,
        description="None: their number is left alone, as where Ray Serve decides it.",
    )
    period_s: float = Field(default=1.0, gt=0, description="Time between two decisions.")
    dry_run: bool = Field(default=False, description="Log what would be done, and do nothing.")
