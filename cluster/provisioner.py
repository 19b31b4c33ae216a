"""Side threads of the control plane: bringing up a worker for a seat, and letting one go."""

import contextlib
import threading
import time
from collections.abc import Callable

import ray
from ray.exceptions import RayError

from expertmesh.actors.attention.actor import replica_stats
from expertmesh.cluster.events import AttemptFailed, Drained, Event, Joined, NotJoined
from expertmesh.cluster.membership import Bundle, Kind, Worker
from expertmesh.cluster.ranks import Share
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.worker_pool import Place, WorkerPool

LONGEST_PAUSE_S = 30.0
# How often a leaving attention replica is asked whether its requests have moved on.
LOOK_S = 0.1


class Provisioner:
    """Fills seats. Every wish ends with Joined or NotJoined in the controller's queue."""

    def __init__(
        self,
        settings: ClusterSettings,
        pool: WorkerPool,
        post: Callable[[Event], None],
        share: Callable[[str], Share],
    ) -> None:
        """share: what the expert actor that fills a seat should load, asked when it is ready to."""
        self._settings, self._pool, self._post, self._share = settings, pool, post, share
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def fill(self, kind: Kind, seat: str, bundle: Bundle | None, attempts: int) -> None:
        """Starts a worker in a thread of its own. bundle: the seat's place, if it has one."""
        arguments = kind, seat, bundle, attempts
        threading.Thread(
            target=self._fill, args=arguments, name=f"fill-{seat}", daemon=True
        ).start()

    def _fill(self, kind: Kind, seat: str, bundle: Bundle | None, attempts: int) -> None:
        pause, reason = self._settings.recovery.pause_s, "the mesh is stopping"
        own = bundle is None
        for attempt in range(attempts):
            if attempt and self._stopping.wait(pause):
                break
            pause = min(2 * pause, LONGEST_PAUSE_S)
            try:
                if bundle is None:
                    limit = self._settings.placement_timeout_s
                    bundle = self._pool.reserve([(kind, seat)], limit)[0].bundle
                worker = self._bring_up(Place(kind, seat, bundle))
            except Exception as error:  # whatever it is, the seat must not stay promised for ever
                reason = str(error) or type(error).__name__
                self._post(AttemptFailed(seat, f"attempt {attempt + 1} of {attempts}: {reason}"))
                continue
            if self._stopping.is_set():
                self._pool.end([worker])
                break
            self._post(Joined(worker))
            return
        if own and bundle is not None:
            self._pool.give_back(bundle)
        self._post(NotJoined(kind, seat, reason))

    def _bring_up(self, place: Place) -> Worker:
        worker = self._pool.start([place], together=False)[0]
        try:
            local = self._settings.expert_actors == 0
            shares = {} if local else {place.seat: self._share_of(place)}
            self._pool.load([worker], shares)
        except BaseException:
            self._pool.end([worker])
            raise
        return worker

    def _share_of(self, place: Place) -> Share:
        return self._share(place.seat) if place.kind == "expert" else {}

    def drain(self, worker: Worker, limit_s: float) -> None:
        """Posts Drained once an attention replica has no requests left, at the latest after
        `limit_s`. Front doors stop using it as soon as the directory does not name it."""
        arguments = worker, limit_s
        threading.Thread(
            target=self._drain, args=arguments, name=f"drain-{worker.seat}", daemon=True
        ).start()

    def _drain(self, worker: Worker, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not self._stopping.wait(LOOK_S):
            with contextlib.suppress(RayError):
                stats = replica_stats(ray.get(worker.handle.stats.remote(), timeout=2.0))
                if stats.engine.running + stats.engine.waiting == 0:
                    break
        self._post(Drained(worker))
