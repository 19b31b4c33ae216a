"""The processes of a mesh: reserve a place, start, load; and end them so that nothing is left."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from expertmesh.actors.attention.actor import AttentionActor
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.cluster import ray_cluster
from expertmesh.cluster.membership import Bundle, Kind, Member, Worker
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.topology import bundle_of, custom_resources, gpus_per_actor, threads_by_rank
from expertmesh.cluster.watch import first_line

_log = logging.getLogger(__name__)

# How often the load is asked how far it is.
PROGRESS_S = 0.5
# Who says nothing for so long while it loads, beside which it can answer, does not load any more.
SILENT_S = 60.0
# Threads of an expert actor: health and statistics must get through beside a load, a meeting of
# the next epoch, and a transfer in each direction.
EXPERT_THREADS = 12


class WorkerError(RuntimeError):
    """A worker could not do what it was asked. Names it, and why."""


class Progress(NamedTuple):
    """Weights read by all actors together, in bytes and bytes per second."""

    done: int
    total: int
    rate: float


class Place(NamedTuple):
    """A seat to fill, and where."""

    kind: Kind
    seat: str
    bundle: Bundle


class WorkerPool:
    """Starts and ends workers of one mesh. Holds no opinion on how many there should be."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._serial = 0
        self._groups: list[Any] = []
        self._lock = threading.Lock()

    # --- places -------------------------------------------------------------------------------

    def reserve(self, kinds: Sequence[tuple[Kind, str]], timeout_s: float) -> list[Place]:
        """One bundle per seat. Raises TimeoutError when Ray has not made room in time; while it
        waits, Ray's own autoscaler sees the group as pending and may add nodes."""
        gpus = gpus_per_actor(self._settings, ray_cluster.nodes())
        bundles = [bundle_of(self._settings, gpus, kind) for kind, _ in kinds]
        group = ray_cluster.reserve(bundles, self._settings.strategy, timeout_s)
        with self._lock:
            self._groups.append(group)
        return [Place(kind, seat, Bundle(group, index)) for index, (kind, seat) in enumerate(kinds)]

    def give_back(self, bundle: Bundle) -> bool:
        """Frees the place of a seat that is given up, if it has a group of its own. False: Ray
        frees a group only as a whole, so this place stays reserved."""
        if len(placement_group_table(bundle.group)["bundles"]) > 1:
            return False
        with self._lock:
            self._groups = [group for group in self._groups if group is not bundle.group]
        ray_cluster.release(bundle.group)
        return True

    # --- processes ----------------------------------------------------------------------------

    def start(self, places: Sequence[Place], together: bool = True) -> list[Worker]:
        """Starts one process per place. Raises WorkerError, and then none of them is left.

        together: they are the whole mesh and share the cores of their nodes.
        """
        settings = self._settings
        nodes = ray_cluster.nodes()
        by_id = {node.id: node for node in nodes}
        homes = [_home(place.bundle) for place in places]
        for place, home in zip(places, homes, strict=True):
            if home not in by_id:
                raise WorkerError(f"the place of {place.seat} is on no live node")
        threads = threads_by_rank(homes, nodes) if together else [1] * len(places)
        if settings.threads_per_actor is not None:
            threads = [settings.threads_per_actor] * len(places)
        gpus = gpus_per_actor(settings, nodes)
        names = [self._name(place.seat) for place in places]
        handles: list[Any] = []
        try:
            for place, name, count in zip(places, names, threads, strict=True):
                handles.append(self._create(place, name, gpus, count))
            calls = [
                handle.settle.remote(by_id[home].address, count)
                for handle, home, count in zip(handles, homes, threads, strict=True)
            ]
            answers = ask_all(names, calls, "start", settings.start_timeout_s)
        except BaseException:
            for handle in handles:
                kill(handle)
            raise
        workers = []
        for place, name, handle, home, where in zip(
            places, names, handles, homes, answers, strict=True
        ):
            member = Member(name, where.pid, where.hostname, where.address)
            workers.append(Worker(place.kind, place.seat, member, handle, place.bundle, home))
        return workers

    def _name(self, seat: str) -> str:
        """A new name for each process in a seat: a dead one's may still be taken."""
        with self._lock:
            serial, self._serial = self._serial, self._serial + 1
        return f"{self._settings.name}-{seat}.{serial}"

    def _create(self, place: Place, name: str, gpus: float, threads: int) -> Any:
        settings = self._settings
        # OpenMP reads these once, when the process loads it. passive: a waiting thread must sleep,
        # or it takes the core that the rank it waits for needs.
        env = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        options: dict[str, Any] = {
            "name": name,
            "namespace": settings.namespace,
            "num_cpus": settings.cpus_per_actor,
            "num_gpus": gpus,
            "resources": custom_resources(settings, place.kind),
            "max_restarts": 0,  # a process that comes back belongs to no epoch
            "runtime_env": {"env_vars": env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                place.bundle.group, placement_group_bundle_index=place.bundle.index
            ),
        }
        if place.kind == "attention":
            return (
                ray.remote(AttentionActor)
                .options(**options)
                .remote(
                    settings.load,
                    settings.engine,
                    settings.exchange,
                    step_limit_s=settings.watch.step_limit_s,
                    hold_s=settings.recovery.hold_s,
                )
            )
        options["max_concurrency"] = EXPERT_THREADS
        return ray.remote(ExpertActor).options(**options).remote(settings.load, settings.exchange)

    def load(
        self,
        workers: Sequence[Worker],
        shares: Mapping[str, dict[int, tuple[int, ...]]],
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """All workers at once, each reading only its own part. Raises WorkerError.

        shares: by seat, what an expert actor holds: layer -> experts.
        """
        with_experts = not shares
        calls = []
        for worker in workers:
            if worker.kind == "attention":
                calls.append(worker.handle.load.remote(with_experts))
            else:
                worker.held = shares[worker.seat]
                calls.append(worker.handle.load.remote(worker.held))
        began = heard = time.monotonic()

        def report() -> None:
            nonlocal heard
            asked = [worker.handle.progress.remote() for worker in workers]
            _, silent = ray.wait(asked, num_returns=len(asked), timeout=5.0)
            if silent:
                if time.monotonic() - heard > SILENT_S:
                    name = workers[asked.index(silent[0])].member.name
                    raise WorkerError(f"{name} fell silent while it was loading")
                return
            heard = time.monotonic()
            if progress is None:
                return
            with contextlib.suppress(RayError):
                states = ray.get(asked)
                done = sum(state.done for state in states)
                total = sum(state.total for state in states)
                progress(Progress(done, total, done / max(time.monotonic() - began, 1e-9)))

        names = [worker.member.name for worker in workers]
        ask_all(names, calls, "load", self._settings.load_timeout_s, report)
        report()

    # --- calls ----------------------------------------------------------------------------------

    def ask(
        self, workers: Sequence[Worker], calls: list[Any], what: str, timeout_s: float
    ) -> list[Any]:
        """The answers, one call per worker. Raises WorkerError that names who failed, at once."""
        return ask_all([worker.member.name for worker in workers], calls, what, timeout_s)

    def share(self, value: Any) -> Any:
        """For an argument that many workers get: it travels once per node."""
        return ray.put(value)

    def wait(self, calls: list[Any], timeout_s: float) -> None:
        """Until all have ended, well or badly."""
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_s)

    # --- the end ------------------------------------------------------------------------------

    def end(self, workers: Sequence[Worker]) -> None:
        """Kills the workers and waits until their processes are gone."""
        for worker in workers:
            kill(worker.handle)
        with contextlib.suppress(RayError):
            members = [(worker.member, worker.node) for worker in workers]
            for member in ray_cluster.reap(members):
                _log.error("%s could not be ended", member)

    def release(self) -> None:
        """Gives all places back."""
        with self._lock:
            groups, self._groups = self._groups, []
        for group in groups:
            ray_cluster.release(group)


def kill(handle: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle, no_restart=True)


def ask_all(
    names: Sequence[str],
    calls: list[Any],
    what: str,
    timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
) -> list[Any]:
    """The answers of all actors. Raises WorkerError that names the first one that fails."""
    end = time.monotonic() + timeout_s
    waiting = list(calls)
    while waiting:
        patience = max(0.0, min(PROGRESS_S, end - time.monotonic()))
        done, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=patience)
        for call in done:
            name = names[calls.index(call)]
            try:
                ray.get(call)
            except RayTaskError as error:
                raise WorkerError(f"{name} could not {what}: {error.cause}") from error
            except RayError as error:
                raise WorkerError(f"{name} could not {what}: {first_line(error)}") from error
        if waiting and time.monotonic() >= end:
            late = [names[calls.index(call)] for call in waiting]
            raise WorkerError(f"{', '.join(late)} did not {what} within {timeout_s:g} s")
        if meanwhile is not None:
            meanwhile()
    return ray.get(calls) if calls else []


def _home(bundle: Bundle) -> str:
    """The node on which Ray has put the bundle: another one after the first has died."""
    home: str = placement_group_table(bundle.group)["bundles_to_node_id"][bundle.index]
    return home
