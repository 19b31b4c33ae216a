"""The options of `expertmesh serve`, and the settings that they make."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from expertmesh.actors.attention.settings import EngineSettings
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.graphs import Choice
from expertmesh.actors.model.loading import Dtype, LoadSettings
from expertmesh.actors.state.settings import LEAST_DISK_BYTES, Codec, KvMode, StateSettings
from expertmesh.cluster.autoscaling.settings import (
    AttentionScaling,
    AutoscaleSettings,
    ExpertScaling,
)
from expertmesh.cluster.settings import (
    ClusterSettings,
    PoolResources,
    RebalanceSettings,
    RecoverySettings,
)
from expertmesh.deploy.auth.keyring import ENVIRONMENT, environment_hashes, open_keyring
from expertmesh.deploy.auth.keys import KeysError
from expertmesh.deploy.edge_settings import EdgeSettings
from expertmesh.deploy.exit_codes import ExitCode, Refused

# Ray's own, which actors reserve anyway.
BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")
# Ray gives it to the head node of every cluster.
HEAD_RESOURCE = "node:__internal_head__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The command's options as given; see `expertmesh serve --help`."""

    model: Path
    expert_actors: int
    attention_replicas: int
    slots_per_actor: int | None = None
    hold_seconds: float = 60.0
    rebalance_seconds: float = 30.0
    min_expert_actors: int | None = None
    max_expert_actors: int | None = None
    min_attention_replicas: int | None = None
    max_attention_replicas: int | None = None
    autoscale_dry_run: bool = False
    routing_record: Path | None = None
    address: str | None
    attention_resource: str | None = None
    expert_resource: str | None = None
    name: str
    host: str
    port: int
    served_model_name: str | None
    grace_seconds: int
    dtype: str
    kernels: str = "auto"
    decode_graphs: str = "auto"
    max_model_len: int | None
    max_running: int
    kv_pages: int
    expert_cache_bytes: int
    prefix_cache: bool = True
    kv_snapshots: int = 16
    host_cache_bytes: int = 250_000_000
    state_dir: Path | None = None
    state_dir_bytes: int | None = None
    state_dir_bytes_per_s: float = 64e6
    kv_read_seconds: float = 2.0
    kv_checkpoint_tokens: int = 256
    sessions_per_tenant: int = 1024
    session_ttl_seconds: int = 86_400
    kv_mode: str = "exact"
    kv_offload_bytes: int = 250_000_000
    kv_offload_disk_bytes: int = 0
    kv_window: int = 4096
    kv_sinks: int = 64
    kv_select_pages: int = 64
    kv_select_mass: float = 0.98
    kv_codec: str = "lossless"
    dry_run: bool
    edge: EdgeSettings = field(default_factory=EdgeSettings)

    @property
    def one_process(self) -> bool:
        return (
            self.expert_actors == 0
            and self.attention_replicas == 1
            and self.address is None
            and self.max_attention_replicas is None
        )

    @property
    def asks_for_keys(self) -> bool:
        auth = self.edge.auth
        return auth.keys_file is not None or bool(auth.key_hashes)

    @property
    def compute(self) -> Dtype:
        return cast(Dtype, self.dtype)

    def load(self) -> LoadSettings:
        return LoadSettings(
            model=self.model,
            dtype=self.compute,
            kernels=self.kernels,
            expert_cache_bytes=self.expert_cache_bytes,
        )

    def engine(self, config: ModelConfig) -> EngineSettings:
        """Raises Refused where options do not go together."""
        return EngineSettings(
            pages=self.kv_pages,
            slots=self.max_running,
            max_context=self.context(config),
            graphs=self.graphs,
            state=self.state(),
        )

    def state(self) -> StateSettings:
        """Raises Refused for a folder without a limit, the other way round, and a codec that would
        lose what nothing else keeps."""
        if self.state_dir is not None and self.state_dir_bytes is None:
            hint = "a folder without a limit fills its disk"
            raise Refused(ExitCode.USAGE, "--state-dir needs --state-dir-gb", hint)
        if self.state_dir is None and self.state_dir_bytes is not None:
            raise Refused(ExitCode.USAGE, "--state-dir-gb needs --state-dir")
        if self.state_dir is None and self.kv_offload_disk_bytes:
            raise Refused(ExitCode.USAGE, "--kv-offload-disk-gb needs --state-dir")
        if self.state_dir_bytes is not None and self.state_dir_bytes < LEAST_DISK_BYTES:
            raise Refused(
                ExitCode.USAGE,
                f"--state-dir-gb {self.state_dir_bytes / 1e9:g} is too little: the folder takes "
                f"at least {LEAST_DISK_BYTES / 1e9:.3g}",
            )
        settings = StateSettings(
            prefix_cache=self.prefix_cache,
            snapshots=self.kv_snapshots,
            host_bytes=self.host_cache_bytes,
            codec=cast(Codec, self.kv_codec),
            disk=self.state_dir,
            disk_bytes=self.state_dir_bytes,
            write_bytes_per_s=self.state_dir_bytes_per_s,
            read_timeout_s=self.kv_read_seconds,
            checkpoint_tokens=self.kv_checkpoint_tokens,
            sessions_per_tenant=self.sessions_per_tenant,
            session_ttl_s=self.session_ttl_seconds,
            kv_mode=cast(KvMode, self.kv_mode),
            offload_bytes=self.kv_offload_bytes,
            offload_disk_bytes=self.kv_offload_disk_bytes,
            window_tokens=self.kv_window,
            sink_tokens=self.kv_sinks,
            select_pages=self.kv_select_pages,
            select_mass=self.kv_select_mass,
        )
        if settings.needs_disk:
            raise Refused(
                ExitCode.USAGE,
                f"--kv-codec {self.kv_codec} needs --state-dir: host memory would keep estimates "
                "of what leaves the device, and nothing the exact bytes that a hit reads",
                "with --host-cache-gb 0 it needs none: then only mode select uses it",
            )
        return settings

    @property
    def graphs(self) -> Choice:
        return cast(Choice, self.decode_graphs)

    def context(self, config: ModelConfig) -> int:
        """What one request may use: never more than the model knows or, where all of it stays on
        the device, than all pages hold."""
        limits = [config.max_position]
        if self.kv_mode == "exact":
            limits.append(self.kv_pages * PAGE_TOKENS)
        return min([*limits, self.max_model_len] if self.max_model_len else limits)

    @property
    def served_name(self) -> str:
        return self.served_model_name or self.model.name

    def autoscale(self, config: ModelConfig) -> AutoscaleSettings | None:
        """None unless a maximum is given. A pool without one keeps its size. Raises Refused."""
        most = config.num_experts if self.expert_actors else 0
        experts = _limits(
            "expert-actors",
            self.expert_actors,
            self.min_expert_actors,
            self.max_expert_actors,
            most,
        )
        attention = _limits(
            "attention-replicas",
            self.attention_replicas,
            self.min_attention_replicas,
            self.max_attention_replicas,
        )
        if experts is None and attention is None:
            if self.autoscale_dry_run:
                hint = "give --max-expert-actors, --max-attention-replicas or both"
                raise Refused(ExitCode.USAGE, "--autoscale-dry-run needs a maximum", hint)
            return None
        return AutoscaleSettings(
            experts=experts and ExpertScaling(min_actors=experts[0], max_actors=experts[1]),
            attention=attention
            and AttentionScaling(min_replicas=attention[0], max_replicas=attention[1]),
            dry_run=self.autoscale_dry_run,
        )

    def cluster(self, config: ModelConfig, slots: int | None) -> ClusterSettings:
        """slots: as preflight.choose_slots found them."""
        return ClusterSettings(
            load=self.load(),
            attention_replicas=self.attention_replicas,
            expert_actors=self.expert_actors,
            slots_per_actor=slots,
            recovery=RecoverySettings(hold_s=self.hold_seconds),
            rebalance=RebalanceSettings(period_s=self.rebalance_seconds),
            autoscale=self.autoscale(config),
            routing_record=self.routing_record,
            engine=self.engine(config),
            name=self.name,
            ray_address=self.address,
            resources=self._resources(),
        )

    def _resources(self) -> PoolResources:
        """Of several hosts only the cluster's head may hold the mesh together."""
        control = {} if self.address is None else {HEAD_RESOURCE: 0.001}
        return PoolResources(
            attention=_one("--attention-resource", self.attention_resource),
            experts=_one("--expert-resource", self.expert_resource),
            control=control,
        )


def _one(flag: str, resource: str | None) -> dict[str, float]:
    if resource is None:
        return {}
    if resource in BUILT_IN or not resource:
        raise Refused(ExitCode.USAGE, f"{flag} {resource!r}: not a custom resource's name")
    return {resource: 1.0}


def with_flags(edge: EdgeSettings, grpc_port: int | None, api_keys: Path | None) -> EdgeSettings:
    """The sections of the file with what has a flag or a variable of its own. Raises Refused, also
    for keys that can not be used."""
    if grpc_port is not None:
        edge = edge.model_copy(update={"grpc": edge.grpc.model_copy(update={"port": grpc_port})})
    if api_keys is not None:
        auth = edge.auth.model_copy(update={"keys_file": api_keys})
        edge = edge.model_copy(update={"auth": auth})
    edge = edge.absolute()
    try:
        auth = edge.auth.with_hashes(environment_hashes(os.environ))
        open_keyring(auth)
    except KeysError as error:
        raise Refused(ExitCode.USAGE, str(error)) from error
    os.environ.pop(ENVIRONMENT, None)  # the processes that this one starts need no keys
    return edge.model_copy(update={"auth": auth})


def _limits(
    pool: str, start: int, least: int | None, most: int | None, possible: int | None = None
) -> tuple[int, int] | None:
    """(min, max) of a pool that begins with `start`; None when it keeps its size. possible: more
    can never work."""
    if most is None:
        if least is not None:
            raise Refused(ExitCode.USAGE, f"--min-{pool} needs --max-{pool}")
        return None
    if possible == 0:
        raise Refused(ExitCode.USAGE, f"--max-{pool}: with --{pool} 0 there is no pool to scale")
    if most < start or (possible is not None and most > possible):
        valid = f"{start} or more" if possible is None else f"{start} to {possible}"
        raise _outside(f"--max-{pool} {most}", valid, pool)
    least = 1 if least is None else least
    if least > start:
        raise _outside(f"--min-{pool} {least}", f"1 to {start}", pool)
    return least, most


def _outside(given: str, valid: str, pool: str) -> Refused:
    return Refused(ExitCode.USAGE, f"{given}: valid numbers are {valid} with this --{pool}")
