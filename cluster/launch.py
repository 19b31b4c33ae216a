"""From settings to a running mesh: check, reserve, start, load, meet; and all the way back."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

from expertmesh.actors.attention.actor import ReplicaStats
from expertmesh.actors.experts.actor import ExpertStats
from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.config import ConfigError, ModelConfig, load_config
from expertmesh.cluster import operators, ray_cluster
from expertmesh.cluster.assembly import Assembly
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.directory import Directory
from expertmesh.cluster.groups.partition import groups_from_recording
from expertmesh.cluster.groups.place import place_groups
from expertmesh.cluster.groups.types import Groups
from expertmesh.cluster.ledger.recording import RecordingError, load_recording_of
from expertmesh.cluster.membership import Epoch, Kind, Worker
from expertmesh.cluster.placement import Placement, PlacementError, contiguous_placement
from expertmesh.cluster.ranks import ExpertRanks
from expertmesh.cluster.recorder import Recorder
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.topology import TopologyError, bundle_of, check_fits, gpus_per_actor
from expertmesh.cluster.upkeep import Upkeep
from expertmesh.cluster.watch import first_line
from expertmesh.cluster.worker_pool import Progress, WorkerError, WorkerPool

__all__ = ["LaunchError", "Mesh", "Progress", "State", "start"]

# What a checkpoint that cannot be served raises, here or in an actor.
DAMAGE = (ConfigError, CheckpointError)
# Time for the running step to end and the farewells to go out.
LEAVE_S = 5.0


class LaunchError(RuntimeError):
    """The mesh could not be started. Nothing of it is left. damaged: because of the checkpoint."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message, damaged)  # all arguments, so that it survives pickling
        self.message, self.damaged = message, damaged

    def __str__(self) -> str:
        return self.message


class State(NamedTuple):
    """state: ready | recovering | unserviceable | stopped. reason: for the middle two, why."""

    state: str
    reason: str


class Mesh:
    """A running mesh. Made by `start`; methods may be called from any thread."""

    def __init__(
        self,
        settings: ClusterSettings,
        pool: WorkerPool,
        controller: Controller,
        upkeep: Upkeep,
        owns_ray: bool,
    ) -> None:
        self.settings, self.controller, self.upkeep = settings, controller, upkeep
        self.recorder = Recorder(upkeep.traffic)
        self._pool, self._owns_ray = pool, owns_ray
        self._stop_lock = threading.Lock()
        self._stopped = False

    @property
    def attention(self) -> list[Any]:
        """Handles of the attention replicas, by rank."""
        return [worker.handle for worker in self.controller.mesh.attention]

    @property
    def experts(self) -> list[Any]:
        """Handles of the expert actors, by rank among them."""
        return [worker.handle for worker in self.controller.mesh.ranks.workers]

    @property
    def epoch(self) -> Epoch:
        return self.controller.mesh.epoch

    def state(self) -> State:
        status = self.controller.status
        return State(status.state, status.reason)

    def directory(self, seen: int, wait_s: float) -> Directory:
        return self.controller.directory(seen, wait_s)

    def wait_state(self, *states: str, timeout: float) -> State:
        """Returns when the mesh is in one of the states, or after `timeout` seconds."""
        end = time.monotonic() + timeout
        while self.state().state not in states and time.monotonic() < end:
            time.sleep(0.01)
        return self.state()

    def stats(self, timeout: float = 2.0) -> tuple[list[ReplicaStats], list[ExpertStats]]:
        """Of the actors that answer in time, by rank."""
        answers = self.upkeep.traffic.ask(timeout)
        return list(answers.replicas.values()), list(answers.experts.values())

    def status(self) -> dict[str, Any]:
        return operators.status(self.controller, self.upkeep.mover)

    def scale(
        self, experts: operators.Wish, attention: operators.Wish, dry_run: bool = False
    ) -> dict[str, Any]:
        """See operators.scale. Raises ScaleError."""
        return operators.scale(self.controller, experts, attention, dry_run)

    def rebalance(self, dry_run: bool = False) -> dict[str, Any]:
        """What a rebalance does; without dry_run it also starts it."""
        if not dry_run:
            self.upkeep.rebalance()
        return operators.rebalance(self.upkeep.plan(), dry_run)

    def stop(self) -> None:
        """Ends every request with an error and every process of the mesh. Idempotent."""
        with self._stop_lock:
            if self._stopped:
                return
            self._stopped = True
        self.upkeep.stop()
        self.controller.stop()
        if not ray.is_initialized():
            return  # the cluster went away, and the actors with it
        leaving = [actor.leave.remote() for actor in self.attention]
        with contextlib.suppress(RayError):
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        workers = [*self.controller.mesh.attention, *self.controller.mesh.ranks.workers]
        _end(self._pool, workers, self._owns_ray)


def start(settings: ClusterSettings, progress: Callable[[Progress], None] | None = None) -> Mesh:
    """Brings up every actor of a mesh. Raises LaunchError, after taking down what it began.

    progress: called about twice a second while the weights are read.
    """
    try:
        config = check_model(settings)
        groups = _groups(settings, config)
        placement = _placement(settings, config, groups)
        owns_ray = ray_cluster.connect(settings)
    except (
        ConfigError, CheckpointError, PlacementError, RecordingError, OSError,
        ray_cluster.RayUnavailable,
    ) as error:  # fmt: skip
        raise LaunchError(str(error), isinstance(error, DAMAGE)) from error
    pool = WorkerPool(settings)
    workers: list[Worker] = []
    try:
        gpus = gpus_per_actor(settings, ray_cluster.nodes())
        seats: list[tuple[Kind, str]] = [
            ("attention", f"attention-{i}") for i in range(settings.attention_replicas)
        ]
        seats += [("expert", f"expert-{i}") for i in range(settings.expert_actors)]
        if not settings.nodes_may_join:
            needed = [bundle_of(settings, gpus, kind) for kind, _ in seats]
            check_fits(needed, ray.cluster_resources())  # type: ignore[no-untyped-call]
        workers = pool.start(pool.reserve(seats, settings.placement_timeout_s))
        attention = workers[: settings.attention_replicas]
        experts = workers[settings.attention_replicas :]
        shares = {worker.seat: placement.of_actor(rank) for rank, worker in enumerate(experts)}
        pool.load(workers, shares, progress)
        ranks = ExpertRanks(config.num_experts, placement, list(experts))
        mesh = Assembly(settings, pool, attention, ranks)
        controller = Controller(settings, pool, mesh)
        upkeep = Upkeep(settings, config, controller, pool, groups)
        return Mesh(settings, pool, controller, upkeep, owns_ray)
    except BaseException as error:
        _end(pool, workers, owns_ray)
        if isinstance(error, WorkerError):
            told = getattr(error.__cause__, "cause", None)  # Ray's error carries the actor's
            raise LaunchError(str(error), isinstance(told, DAMAGE)) from error
        if isinstance(error, RayError | TopologyError | TimeoutError | ValueError):
            raise LaunchError(first_line(error)) from error
        raise


def check_model(settings: ClusterSettings) -> ModelConfig:
    """Here as well as in every actor: a bad file is found before any process is started. Raises
    ConfigError, CheckpointError and OSError."""
    if not settings.check_checkpoint:
        return load_config(settings.load.model)
    opened = settings.load.open()
    opened.source.close()
    return opened.config


def _groups(settings: ClusterSettings, config: ModelConfig) -> Groups | None:
    """Raises RecordingError for a file that is none, or of another model."""
    if settings.routing_record is None or settings.expert_actors < 2:
        return None
    recording = load_recording_of(settings.routing_record, config.moe_layers, config.num_experts)
    return groups_from_recording(recording, settings.expert_actors)


def _placement(settings: ClusterSettings, config: ModelConfig, groups: Groups | None) -> Placement:
    """Every expert once. Raises PlacementError when the actors or their slots are too few."""
    actors = settings.expert_actors
    if actors == 0:
        return Placement({})
    placement = contiguous_placement(config.moe_layers, config.num_experts, actors)
    slots = settings.slots(config.num_experts, actors)
    if slots * actors < config.num_experts:
        raise PlacementError(
            f"slots_per_actor {slots}: {actors} expert actors need at least "
            f"{-(-config.num_experts // actors)} slots for {config.num_experts} experts per layer"
        )
    return placement if groups is None else place_groups(groups, None, actors, slots)


def _end(pool: WorkerPool, workers: list[Worker], owns_ray: bool) -> None:
    pool.end(workers)
    pool.release()
    if owns_ray:
        ray.shutdown()
