"""The named actor that keeps a mesh: where front doors and operators reach the control plane."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from expertmesh.cluster import ray_cluster
from expertmesh.cluster.directory import Directory
from expertmesh.cluster.launch import LaunchError, Mesh, start
from expertmesh.cluster.operators import Wish
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.watch import first_line
from expertmesh.cluster.worker_pool import Progress

_log = logging.getLogger(__name__)

# Each front door keeps one call to `directory` open.
THREADS = 32
DIRECTORY_WAIT_S = 10.0
STOP_S = 40.0


class MeshKeeper:
    """Run as a threaded Ray actor: a long `start` never delays `progress`."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._mesh: Mesh | None = None
        self._progress: Progress | None = None
        self._starting = threading.Lock()

    def start(self) -> None:
        """Brings the mesh up. Raises LaunchError."""
        with self._starting:
            if self._mesh is None:
                self._mesh = start(self._settings, self._note)

    def _note(self, progress: Progress) -> None:
        self._progress = progress

    def progress(self) -> Progress | None:
        return self._progress

    @property
    def mesh(self) -> Mesh:
        if self._mesh is None:
            raise RuntimeError("the mesh is starting")
        return self._mesh

    # --- for front doors ------------------------------------------------------------------------

    def directory(self, seen: int, wait_s: float) -> Directory:
        """The directory once it is another than version `seen`, at the latest after wait_s."""
        if self._mesh is None:
            time.sleep(min(wait_s, 0.2))
            return Directory()
        return self._mesh.directory(seen, min(wait_s, DIRECTORY_WAIT_S))

    # --- for operators --------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Members, placement in numbers, and what has happened; plain data for JSON."""
        return self.mesh.status()

    def scale(
        self, experts: Wish = None, attention: Wish = None, dry_run: bool = False
    ) -> dict[str, Any]:
        """See operators.scale. Raises ScaleError."""
        return self.mesh.scale(experts, attention, dry_run)

    def rebalance(self, dry_run: bool = False) -> dict[str, Any]:
        return self.mesh.rebalance(dry_run)

    def routing_report(self) -> dict[str, Any]:
        """The ledger's report, as plain data."""
        return self.mesh.upkeep.traffic.report()

    def routing_overview(self) -> bytes:
        """See Traffic.overview."""
        return self.mesh.upkeep.traffic.overview()

    def record_routing(self, seconds: float, tokens: int) -> bytes:
        """An .npz of what whole tokens chose; see Recorder.record."""
        return self.mesh.recorder.record(seconds, tokens, self._settings.load.model.name)

    def mesh_stats(self) -> bytes:
        """MeshStats as msgpack, for the exporter."""
        upkeep = self.mesh.upkeep
        return msgspec.msgpack.encode(upkeep.traffic.stats(upkeep.mover.moves))

    def stop(self) -> None:
        if self._mesh is not None:
            self._mesh.stop()


class Keeper:
    """The driver's end of a MeshKeeper."""

    def __init__(self, settings: ClusterSettings, handle: Any, owns_ray: bool) -> None:
        self.settings, self.handle, self._owns_ray = settings, handle, owns_ray

    def directory(self, seen: int = -1, wait_s: float = 0.0) -> Directory:
        """Raises RayError when the keeper has died."""
        answer: Directory = ray.get(
            self.handle.directory.remote(seen, wait_s), timeout=wait_s + DIRECTORY_WAIT_S
        )
        return answer

    def stop(self) -> None:
        """Ends the mesh and everything of it. Idempotent."""
        if not ray.is_initialized():
            return
        with contextlib.suppress(RayError):
            ray.get(self.handle.stop.remote(), timeout=STOP_S)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.handle, no_restart=True)
        if self._owns_ray:
            ray.shutdown()


def start_keeper(
    settings: ClusterSettings, progress: Callable[[Progress], None] | None = None
) -> Keeper:
    """Starts the mesh in an actor of its own. Raises LaunchError; then nothing is left."""
    try:
        owns_ray = ray_cluster.connect(settings)
    except ray_cluster.RayUnavailable as error:
        raise LaunchError(str(error)) from error
    options = {
        "name": settings.mesh_name,
        "namespace": settings.namespace,
        "num_cpus": 0,
        "resources": dict(settings.resources.control),
        "max_concurrency": THREADS,
        "max_restarts": 0,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}},
    }
    keeper: Keeper | None = None
    try:
        handle = ray.remote(MeshKeeper).options(**options).remote(settings)
        keeper = Keeper(settings, handle, owns_ray)
        _wait(handle, progress)
        return keeper
    except BaseException as error:
        if keeper is not None:
            keeper.stop()
        elif owns_ray:
            ray.shutdown()
        if isinstance(error, RayTaskError) and isinstance(error.cause, LaunchError):
            raise error.cause from error
        if isinstance(error, RayActorError | ValueError):
            raise LaunchError(first_line(error)) from error
        raise


def _wait(handle: Any, progress: Callable[[Progress], None] | None) -> None:
    started, told = handle.start.remote(), None
    while not ray.wait([started], timeout=0.5)[0]:
        with contextlib.suppress(RayError):
            now = ray.get(handle.progress.remote(), timeout=5.0)
            if progress is not None and now is not None and now != told:
                told = now
                progress(now)
    ray.get(started)
