"""The settings of a whole mesh: the actors' own settings, and how many actors where."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.model.loading import LoadSettings


class WatchSettings(BaseModel):
    """How soon a dead or stuck actor is noticed. A death is seen at once, a silence by these."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    period_s: float = Field(
        default=0.25, gt=0, description="Time between two health calls to an actor."
    )
    silence_s: float = Field(
        default=1.75,
        gt=0,
        description="An actor that leaves a health call unanswered for longer is lost. Raise it "
        "where processors are shared with other work.",
    )
    step_limit_s: float = Field(
        default=60.0, gt=0, description="An engine whose step runs longer is stuck."
    )


class ClusterSettings(BaseModel):
    """Frozen; unknown keys are refused by name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    load: LoadSettings
    attention_replicas: int = Field(
        default=1, ge=1, description="Engines, each with its own KV state."
    )
    expert_actors: int = Field(
        default=2,
        ge=0,
        description="Actors that share the routed experts; 0: each replica has them all.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings)
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    watch: WatchSettings = Field(default_factory=WatchSettings)
    name: str = Field(
        default="expertmesh",
        pattern=r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$",
        description="Prefix of the actors' names; one per mesh in a Ray namespace.",
    )
    namespace: str = Field(
        default="expertmesh", min_length=1, description="Ray namespace of the actors."
    )
    ray_address: str | None = Field(
        default=None,
        description='An existing Ray cluster ("auto" or host:port). Unset: start a local one.',
    )
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = Field(
        default="PACK", description="Ray placement strategy over nodes."
    )
    cpus_per_actor: float = Field(
        default=1.0, gt=0, description="Ray CPU slots that each actor reserves. Slots, not threads."
    )
    gpus_per_actor: float | None = Field(
        default=None,
        ge=0,
        description="Ray GPUs that each actor reserves. Unset: 1 where there are GPUs.",
    )
    threads_per_actor: int | None = Field(
        default=None,
        ge=1,
        description="Threads per process. Unset: the node's cores over its actors.",
    )
    placement_timeout_s: float = Field(
        default=60.0, gt=0, description="How long to wait for Ray to reserve the slots."
    )
    start_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="How long an actor process may take to come up, without loading.",
    )
    load_timeout_s: float = Field(
        default=7200.0, gt=0, description="How long all actors may take to load the weights."
    )

    @property
    def actors(self) -> int:
        return self.attention_replicas + self.expert_actors

    @property
    def actor_names(self) -> tuple[str, ...]:
        """By rank: attention replicas, then expert actors."""
        kinds = [f"attention-{i}" for i in range(self.attention_replicas)]
        kinds += [f"expert-{i}" for i in range(self.expert_actors)]
        return tuple(f"{self.name}-{kind}" for kind in kinds)
