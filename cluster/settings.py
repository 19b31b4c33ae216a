"""The settings of a whole mesh: the actors' own settings, and how many actors where."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.cluster.autoscaling.settings import AutoscaleSettings

# Of a cluster that is started here. Request data never goes through the object store; this is
# enough for Ray's own needs.
OBJECT_STORE_BYTES = 128 << 20


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


class RecoverySettings(BaseModel):
    """What happens after an actor is lost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hold_s: float = Field(
        default=60.0,
        gt=0,
        description="How long running requests wait for a mesh that cannot serve, before they "
        "fail. New ones are refused as soon as it is clear that it cannot.",
    )
    grace_s: float = Field(
        default=5.0,
        gt=0,
        description="A recovery that takes longer turns readiness red; until then requests are "
        "accepted and wait.",
    )
    meet_s: float = Field(
        default=5.0,
        gt=0,
        description="A survivor that has not come to the next epoch within this time is lost too.",
    )
    restarts: int = Field(
        default=5,
        ge=0,
        description="Attempts to replace an actor that keeps failing, with growing pauses; after "
        "that its seat is left alone for rest_s, or until the mesh is scaled.",
    )
    rest_s: float = Field(
        default=60.0, gt=0, description="How long a seat that could not be filled is left alone."
    )
    pause_s: float = Field(
        default=1.0, gt=0, description="Pause before the second attempt; doubles with each."
    )


class RebalanceSettings(BaseModel):
    """When copies of experts move, and how."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    period_s: float = Field(
        default=30.0, ge=0, description="Time between two looks at the balance; 0: never."
    )
    fill_spares: bool = Field(
        default=True,
        description="Whether spare slots are filled with copies, which balance the load and make "
        "the loss of an actor cheaper.",
    )
    trigger: float = Field(
        default=1.05,
        ge=1,
        description="Largest load over mean load of the actors from which on moving pays.",
    )
    least_tokens: int = Field(
        default=2048, ge=1, description="Fewer tokens than this say nothing about popularity."
    )
    transfer_s: float = Field(
        default=30.0, gt=0, description="A copy that takes longer is given up, and its plan too."
    )


def _custom(resources: dict[str, float]) -> dict[str, float]:
    for name, amount in resources.items():
        if name in ("CPU", "GPU", "memory") or not name:
            raise ValueError(f"{name or 'an empty name'} is not a custom resource's name")
        if amount <= 0:
            raise ValueError(f"{name} must be more than 0")
    return resources


CustomResources = Annotated[dict[str, float], AfterValidator(_custom)]


class PoolResources(BaseModel):
    """Custom Ray resources that processes reserve besides CPU and GPU, each kind its own. Nodes
    that offer one (`ray start --resources`) are the only ones where that kind can run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    attention: CustomResources = Field(
        default_factory=dict, description="Of each attention replica."
    )
    experts: CustomResources = Field(default_factory=dict, description="Of each expert actor.")
    control: CustomResources = Field(
        default_factory=dict,
        description="Of the control plane's actors. They hold the mesh together, so they belong "
        "where the cluster's head is, not on a node that may be lost.",
    )
    front_door: CustomResources = Field(
        default_factory=dict, description="Of each front door that runs behind Serve's proxies."
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
    slots_per_actor: int | None = Field(
        default=None,
        ge=1,
        description="Experts of each layer that an expert actor may hold. Unset: the fewest with "
        "which any one actor can be lost.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings)
    exchange: ExchangeSettings = Field(default_factory=ExchangeSettings)
    watch: WatchSettings = Field(default_factory=WatchSettings)
    recovery: RecoverySettings = Field(default_factory=RecoverySettings)
    rebalance: RebalanceSettings = Field(default_factory=RebalanceSettings)
    autoscale: AutoscaleSettings | None = Field(
        default=None, description="Unset: the numbers of actors change only when asked to."
    )
    routing_record: Path | None = Field(
        default=None,
        description="Recorded traffic (`expertmesh routing record`): experts that tokens choose "
        "together are placed together. Unset: neighbours are.",
    )
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
        description="Ray GPUs that each actor reserves. Unset: 1 where there are GPUs at the "
        "start; to be set where nodes with GPUs may join later.",
    )
    resources: PoolResources = Field(
        default_factory=PoolResources, description="Which kinds of nodes which processes run on."
    )
    threads_per_actor: int | None = Field(
        default=None,
        ge=1,
        description="Threads per process. Unset: the node's cores over its actors.",
    )
    placement_timeout_s: float = Field(
        default=60.0, gt=0, description="How long to wait for Ray to reserve the slots."
    )
    check_checkpoint: bool = Field(
        default=True,
        description="Whether the control plane checks all shards before it starts an actor. Off "
        "where only the actors' nodes have them; they check what they read in any case.",
    )
    nodes_may_join: bool = Field(
        default=False,
        description="Whether a cluster that is too small for the launch may still grow, as where "
        "nodes start one by one or an autoscaler adds them: then the slots are waited for. If "
        "not, it is refused at once.",
    )
    start_timeout_s: float = Field(
        default=120.0,
        gt=0,
        description="How long an actor process may take to come up, without loading.",
    )
    load_timeout_s: float = Field(
        default=7200.0, gt=0, description="How long all actors may take to load the weights."
    )

    @model_validator(mode="after")
    def _state_comes_back(self) -> Self:
        state = self.engine.state
        if state.needs_disk:
            raise ValueError(
                f"engine.state.codec {state.codec} needs engine.state.disk, or host_bytes 0: host "
                "memory would keep estimates, and nothing the exact bytes that a hit reads"
            )
        return self

    @property
    def actors(self) -> int:
        return self.attention_replicas + self.expert_actors

    @property
    def mesh_name(self) -> str:
        """Of the named actor that keeps the mesh."""
        return f"{self.name}-mesh"

    def slots(self, experts: int, actors: int) -> int:
        """Experts of a layer that each of `actors` expert actors may hold."""
        if self.slots_per_actor is not None:
            return min(self.slots_per_actor, experts)
        return experts if actors <= 1 else -(-experts // (actors - 1))
