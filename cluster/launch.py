"""From settings to a running mesh: reserve, start, load, meet, watch; and all the way back."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from expertmesh.actors.attention.actor import AttentionActor, ReplicaStats
from expertmesh.actors.experts.actor import ExpertActor, ExpertStats
from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.config import ConfigError
from expertmesh.cluster import ray_cluster
from expertmesh.cluster.membership import Epoch, Member
from expertmesh.cluster.placement import Placement, PlacementError, contiguous_placement
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.topology import (
    TopologyError,
    bundles,
    check_fits,
    gpus_per_actor,
    threads_by_rank,
)
from expertmesh.cluster.watch import Watch, first_line

_log = logging.getLogger(__name__)

# How often the load is asked how far it is.
PROGRESS_S = 0.5
# Time for the running step to end and the farewells to go out.
LEAVE_S = 5.0


class LaunchError(RuntimeError):
    """The mesh could not be started. Nothing of it is left."""


class Progress(NamedTuple):
    """Weights read by all actors together, in bytes and bytes per second."""

    done: int
    total: int
    rate: float


class State(NamedTuple):
    """state: ready | failed | stopped. reason: for failed, which actor and why."""

    state: str
    reason: str


class Mesh:
    """A running mesh. Made by `start`; methods may be called from any thread."""

    def __init__(
        self,
        settings: ClusterSettings,
        epoch: Epoch,
        attention: Sequence[Any],
        experts: Sequence[Any],
        slots: ray_cluster.Slots,
        owns_ray: bool,
    ) -> None:
        self.settings, self.epoch = settings, epoch
        self.attention, self.experts = list(attention), list(experts)
        self._slots, self._owns_ray = slots, owns_ray
        self._state = State("ready", "")
        self._changed = threading.Condition()
        actors = dict(zip(epoch.members, [*attention, *experts], strict=True))
        self._watch = Watch(actors, settings.watch, self._on_failure)

    def state(self) -> State:
        return self._state

    def wait_failed(self, timeout: float | None = None) -> State:
        """Returns when the mesh is no longer ready, or after `timeout` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.state != "ready", timeout)
        return self._state

    def stats(self, timeout: float = 2.0) -> tuple[list[ReplicaStats], list[ExpertStats]]:
        """Of the actors that answer in time."""
        calls = [actor.stats.remote() for actor in [*self.attention, *self.experts]]
        ray.wait(calls, num_returns=len(calls), timeout=timeout)
        replicas: list[ReplicaStats] = []
        experts: list[ExpertStats] = []
        for rank, call in enumerate(calls):
            with contextlib.suppress(RayError):
                answer = ray.get(call, timeout=0)
                if rank < len(self.attention):
                    replicas.append(msgspec.msgpack.decode(answer, type=ReplicaStats))
                else:
                    experts.append(answer)
        return replicas, experts

    def stop(self) -> None:
        """Ends every request with an error and every process of the mesh. Idempotent."""
        if not self._enter("stopped", ""):
            return
        self._watch.stop()
        if not ray.is_initialized():
            return  # the cluster went away, and the actors with it
        leaving = [actor.leave.remote() for actor in self.attention]
        with contextlib.suppress(RayError):
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)
        members = list(zip(self.epoch.members, self._slots.homes, strict=True))
        _end(self._slots, [*self.attention, *self.experts], members, self._owns_ray)

    def _on_failure(self, member: Member, reason: str) -> None:
        why = f"{member} {reason}"
        if not self._enter("failed", why):
            return
        # Their own deadlines would tell the replicas too; this is sooner and names the culprit.
        for actor in self.attention:
            actor.fail.remote(why)

    def _enter(self, state: str, reason: str) -> bool:
        with self._changed:
            if self._state.state == "stopped" or self._state.state == state:
                return False
            self._state = State(state, reason)
            self._changed.notify_all()
            return True


def start(settings: ClusterSettings, progress: Callable[[Progress], None] | None = None) -> Mesh:
    """Brings up every actor of a mesh. Raises LaunchError, after taking down what it began.

    progress: called about twice a second while the weights are read.
    """
    try:
        placement = _placement(settings)
        owns_ray = ray_cluster.connect(settings)
    except (ConfigError, CheckpointError, PlacementError, ray_cluster.RayUnavailable) as error:
        raise LaunchError(str(error)) from error
    slots: ray_cluster.Slots | None = None
    actors: list[Any] = []
    members: list[Member] = []
    try:
        nodes = ray_cluster.nodes()
        needed = bundles(settings, gpus := gpus_per_actor(settings, nodes))
        check_fits(needed, ray.cluster_resources())  # type: ignore[no-untyped-call]
        slots = ray_cluster.reserve(needed, settings.strategy, settings.placement_timeout_s)
        threads = threads_by_rank(slots.homes, nodes)
        if settings.threads_per_actor is not None:
            threads = [settings.threads_per_actor] * settings.actors
        addresses = {node.id: node.address for node in nodes}
        for rank in range(settings.actors):
            actors.append(_create(settings, rank, slots, gpus, threads[rank]))
        members += _settle(settings, actors, [addresses[home] for home in slots.homes], threads)
        _load(settings, actors, placement, progress)
        epoch = _meet(settings, actors, members, placement)
        attention = actors[: settings.attention_replicas]
        experts = actors[settings.attention_replicas :]
        return Mesh(settings, epoch, attention, experts, slots, owns_ray)
    except BaseException as error:
        homes = slots.homes if slots is not None else ()
        _end(slots, actors, list(zip(members, homes, strict=False)), owns_ray)
        if isinstance(error, RayError | TopologyError | TimeoutError | ValueError):
            raise LaunchError(first_line(error)) from error
        raise


def _placement(settings: ClusterSettings) -> Placement:
    """Also checks the checkpoint here: a bad file is found before any process is started."""
    opened = settings.load.open()
    opened.source.close()
    config = opened.config
    if settings.expert_actors == 0:
        return Placement({})
    return contiguous_placement(config.moe_layers, config.num_experts, settings.expert_actors)


def _create(
    settings: ClusterSettings, rank: int, slots: ray_cluster.Slots, gpus: float, threads: int
) -> Any:
    # OpenMP reads these once, when the process loads it. passive: a waiting thread must sleep, or
    # it takes the core that the rank it waits for needs.
    env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    options = {
        "name": settings.actor_names[rank],
        "namespace": settings.namespace,
        "num_cpus": settings.cpus_per_actor,
        "num_gpus": gpus,
        "max_restarts": 0,  # a process that comes back belongs to no epoch
        "runtime_env": {"env_vars": env},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            slots.group, placement_group_bundle_index=rank
        ),
    }
    load, exchange = settings.load, settings.exchange
    if rank < settings.attention_replicas:
        actor = ray.remote(AttentionActor).options(**options)
        limit = settings.watch.step_limit_s
        return actor.remote(load, settings.engine, exchange, step_limit_s=limit)
    return ray.remote(ExpertActor).options(**options, max_concurrency=8).remote(load, exchange)


def _settle(
    settings: ClusterSettings, actors: list[Any], addresses: list[str], threads: list[int]
) -> list[Member]:
    calls = [
        actor.settle.remote(address, count)
        for actor, address, count in zip(actors, addresses, threads, strict=True)
    ]
    answers = _all(settings, calls, "start", settings.start_timeout_s)
    return [
        Member(name, where.pid, where.hostname, where.address)
        for name, where in zip(settings.actor_names, answers, strict=True)
    ]


def _load(
    settings: ClusterSettings,
    actors: list[Any],
    placement: Placement,
    progress: Callable[[Progress], None] | None,
) -> None:
    """All actors at once, each reading only its own part."""
    replicas = settings.attention_replicas
    calls = [actor.load.remote(settings.expert_actors == 0) for actor in actors[:replicas]]
    calls += [
        actor.load.remote(placement.of_actor(index))
        for index, actor in enumerate(actors[replicas:])
    ]
    began = time.monotonic()

    def report() -> None:
        if progress is None:
            return
        asked = [actor.progress.remote() for actor in actors]
        with contextlib.suppress(RayError):
            states = ray.get(asked, timeout=5.0)
            done = sum(state.done for state in states)
            total = sum(state.total for state in states)
            progress(Progress(done, total, done / max(time.monotonic() - began, 1e-9)))

    _all(settings, calls, "load", settings.load_timeout_s, report)
    report()


def _meet(
    settings: ClusterSettings, actors: list[Any], members: list[Member], placement: Placement
) -> Epoch:
    replicas = settings.attention_replicas
    attention, experts = tuple(members[:replicas]), tuple(members[replicas:])
    limit = settings.exchange.join_deadline_s + 10.0
    if not experts:
        calls = [actor.join.remote(None, rank) for rank, actor in enumerate(actors)]
        _all(settings, calls, "join", limit)
        return Epoch(0, attention, experts, placement, ("", 0))
    store = _all(settings, [actors[0].open_store.remote()], "open the store", limit)[0]
    epoch = Epoch(0, attention, experts, placement, store)
    roster = ray.put(epoch.roster())  # the whole placement, once instead of per actor
    calls = [actor.join.remote(roster, rank) for rank, actor in enumerate(actors)]
    _all(settings, calls, "join", limit)
    return epoch


def _all(
    settings: ClusterSettings,
    calls: list[Any],
    what: str,
    timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> list[Any]:
    """The answers of all actors. Raises LaunchError that names the first one that fails."""
    end = time.monotonic() + timeout_s
    waiting = list(calls)
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PROGRESS_S)
        for call in done:
            name = settings.actor_names[calls.index(call)]
            try:
                ray.get(call)
            except RayTaskError as error:
                raise LaunchError(f"{name} could not {what}: {error.cause}") from error
            except RayError as error:
                raise LaunchError(f"{name} could not {what}: {first_line(error)}") from error
        if waiting and time.monotonic() > end:
            late = [settings.actor_names[calls.index(call)] for call in waiting]
            raise LaunchError(f"{', '.join(late)} did not {what} within {timeout_s:g} s")
        if meanwhile is not None:
            meanwhile()
    return ray.get(calls)


def _end(
    slots: ray_cluster.Slots | None,
    actors: Sequence[Any],
    members: Sequence[tuple[Member, str]],
    owns_ray: bool,
) -> None:
    """Kills the actors, waits until their processes are gone and gives the slots back."""
    for actor in actors:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(RayError):
        for member in ray_cluster.reap(members):
            _log.error("%s could not be ended", member)
    if slots is not None:
        slots.release()
    if owns_ray:
        ray.shutdown()
