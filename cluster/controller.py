"""The control plane of one mesh: who is in it, and what happens when that changes.

One thread decides. Losses, arrivals and wishes reach it through a queue; it first makes the present
workers one working epoch again, then makes their number what it should be. What takes long
(starting a process, loading, copying experts) runs beside it and reports through the same queue.
"""

import logging
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from expertmesh.cluster.assembly import Assembly
from expertmesh.cluster.balancing.recovery import NoCapacity
from expertmesh.cluster.directory import Directory, ScaleError
from expertmesh.cluster.epochs import HalfMoved
from expertmesh.cluster.events import (
    AttemptFailed,
    Drained,
    EpochBroken,
    Event,
    Joined,
    NotJoined,
    Retry,
    TryAgain,
    Wished,
    WorkerLost,
)
from expertmesh.cluster.membership import Kind, Worker
from expertmesh.cluster.mesh_state import TICK_S, Counts, MeshState, Status
from expertmesh.cluster.placement import Placement
from expertmesh.cluster.provisioner import Provisioner
from expertmesh.cluster.ranks import Share
from expertmesh.cluster.seats import Seats
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.watch import Watch
from expertmesh.cluster.worker_pool import WorkerError, WorkerPool

_log = logging.getLogger(__name__)

# Attempts to make an epoch of the same workers before the mesh counts as unable to.
ATTEMPTS = 4
RETRY_S = 2.0
# So many breaks without a loss in so many seconds are some request's fault.
BREAKS, BREAKS_S = 4, 30.0
# How long a leaving attention replica may go on with requests that do not move.
DRAIN_S = 10.0
# More attention replicas than this are a slip of the finger.
MOST_REPLICAS = 1000


class Controller:
    """Owns the membership of a mesh from its first epoch on."""

    def __init__(self, settings: ClusterSettings, pool: WorkerPool, mesh: Assembly) -> None:
        self.settings, self._pool, self.mesh = settings, pool, mesh
        # Guards `mesh` and what follows. Held while an epoch forms, which takes long when experts
        # have to be read; who only wants to know or to wish something does without it.
        self.lock = threading.RLock()
        self.loads: Mapping[int, Any] | None = None  # layer -> hits [E], once there was traffic
        self.counts, self.last_error, self.last_loss = Counts(), "", ""
        self._dirty = False  # the epoch is not what the workers here should be
        self._dying: set[Worker] = set()  # the watch has ended them; the loss is in the inbox
        self._breaks: list[float] = []  # when epochs broke without a loss
        self._seats = Seats(mesh, pool.give_back)
        self._state = MeshState(self._replicas, settings.recovery.grace_s)
        self._inbox: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._provisioner = Provisioner(settings, pool, self.post, self._share)
        self._watch = Watch(
            settings.watch,
            self._report,
            lambda epoch, why: self.post(EpochBroken(epoch, why)),
        )
        self._watch.follow(mesh.workers)
        self._state.publish()
        self._thread = threading.Thread(target=self._main, name="mesh-control", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """From any thread."""
        self._inbox.put(event)

    def _report(self, worker: Worker, reason: str) -> None:
        """From the watch's thread. The control thread may be waiting for this very worker: its
        calls fail as soon as it has ended."""
        self._dying.add(worker)
        self.post(WorkerLost(worker, reason))
        self._end([worker])

    def stop(self) -> None:
        """No decision is taken any more. The workers are the caller's to end."""
        self._watch.stop()
        self._provisioner.stop()
        self._inbox.put(None)
        self._thread.join(10.0)
        self._state.enter("stopped", "the mesh was stopped")

    # --- what others may ask, from any thread ---------------------------------------------------

    @property
    def status(self) -> Status:
        return self._state.status

    def directory(self, seen: int, wait_s: float) -> Directory:
        """See MeshState.directory."""
        return self._state.directory(seen, wait_s)

    def scale(self, experts: int | None, attention: int | None, dry_run: bool = False) -> None:
        """Sets how many workers there should be. Raises ScaleError; dry_run: does nothing else."""
        with self._seats.wishes:
            if experts is not None:
                self._check_experts(experts)
            if attention is not None and attention < 1:
                raise ScaleError(f"attention {attention}: at least 1 replica", "attention")
            if attention is not None and attention > MOST_REPLICAS:
                most = f"at most {MOST_REPLICAS} replicas"
                raise ScaleError(f"attention {attention}: {most}", "attention")
            if dry_run:
                return
            if experts is not None:
                self._seats.desired["expert"] = experts
            if attention is not None:
                self._seats.desired["attention"] = attention
        self.post(Wished())

    def _check_experts(self, wanted: int) -> None:
        experts, least = self.mesh.ranks.experts, 1
        if self._seats.desired["expert"] == 0:
            raise ScaleError("experts: this mesh has no expert actors to scale", "experts")
        if self.settings.slots_per_actor is not None:
            least = -(-experts // self.mesh.slots)
        if not least <= wanted <= experts:
            raise ScaleError(
                f"experts {wanted}: {experts} experts per layer fit {least} to {experts} actors",
                "experts",
            )

    def wishing(self) -> AbstractContextManager[object]:
        """Held around reading `desired` and wishing for something relative to it."""
        return self._seats.wishes

    def desired(self) -> dict[Kind, int]:
        with self._seats.wishes:
            return dict(self._seats.desired)

    def changing(self) -> bool:
        """A recovery, an arrival or a departure is under way."""
        with self.lock:
            return self.status.state != "ready" or bool(self._seats.filling or self._seats.leaving)

    def leaving(self) -> frozenset[Worker]:
        """Workers that end once nothing depends on them: nobody else moves copies off experts."""
        return frozenset(self._seats.leaving)

    def flip(self, epoch: int, placement: Placement) -> bool:
        """Routes by `placement` from the next step on, if the mesh still is in that epoch.

        Every copy it names must be in place. False: drop nothing, a new epoch is on its way.
        """
        with self.lock:
            if self._dirty or self.mesh.epoch.number != epoch or self.status.state != "ready":
                return False
            if self.mesh.flip(placement):
                return True
            self._dirty = True
        self.post(Retry())
        return False

    # --- the control thread ---------------------------------------------------------------------

    def _main(self) -> None:
        while (event := self._inbox.get()) is not None:
            try:
                with self.lock:
                    self._absorb(event)
                    if self._dirty:
                        self._repair()
                    self._reconcile()
                    self._watch.follow(self.mesh.workers)
            except Exception:
                _log.exception("the control thread stumbled over %s", event)
                self._post_later(RETRY_S, Retry())
            self._state.publish()

    def _absorb(self, event: Event) -> None:
        """Takes note; the work is in _repair and _reconcile."""
        if isinstance(event, WorkerLost):
            self._lose(event.worker, event.reason)
        elif isinstance(event, EpochBroken):
            if event.epoch == self.mesh.epoch.number and self.status.state == "ready":
                self._mend(event.reason)
        elif isinstance(event, Joined):
            self._join(event.worker)
        elif isinstance(event, NotJoined):
            self._miss(event.kind, event.seat, event.reason, final=True)
        elif isinstance(event, AttemptFailed):
            self._note_failed_join(event.seat, event.reason)
        elif isinstance(event, Wished):
            self._take_wish()
        elif isinstance(event, TryAgain):
            if self._seats.given_up.pop(event.seat, None) is not None:
                self._seats.tries[event.seat] = 0
        elif isinstance(event, Drained) and event.worker in self._seats.leaving:
            self._let_go(event)

    def _take_wish(self) -> None:
        if self.settings.slots_per_actor is None and (experts := self.desired()["expert"]):
            # Fewer slots only once those that are wanted are here, see _settle.
            slots = self.settings.slots(self.mesh.ranks.experts, experts)
            self.mesh.slots = max(self.mesh.slots, slots)
            # Fewer actors with more slots each: those that are left may be enough now.
            self._dirty = self._dirty or self.status.state == "unserviceable"
        self._seats.forgive()

    def _let_go(self, event: Drained) -> None:
        """While others are missing, one who was to leave may be who the mesh lives on."""
        if self.status.state != "ready":
            self._post_later(RETRY_S, event)
            return
        self._seats.leaving.discard(event.worker)
        self.mesh.remove(event.worker)
        self._seats.released.append(event.worker)
        self._dirty = True

    def _lose(self, worker: Worker, reason: str) -> None:
        ended = worker in self._dying
        self._dying.discard(worker)
        if worker not in self.mesh.workers:
            return
        why = f"{worker} {reason}"
        self.counts.losses += 1
        self.last_loss = why
        self.mesh.remove(worker)
        self.mesh.abort_epoch(why)
        self._dirty = True
        self._state.enter("recovering", why)
        if not ended:
            self._end([worker])  # a stopped process must not come back
        self._seats.lose(worker)

    def _mend(self, reason: str) -> None:
        """The epoch broke with everybody alive. When that goes on, it is not the connections: some
        request breaks whatever computes it, and must not be sent into every next epoch."""
        now = time.monotonic()
        self._breaks = [at for at in self._breaks if now - at < BREAKS_S] + [now]
        if len(self._breaks) >= BREAKS:
            self._breaks = []
            why = f"{BREAKS} epochs in a row broke without a lost process, the last one: {reason}"
            for worker in self.mesh.attention:
                worker.handle.give_up.remote(why)
        self._dirty = True
        self._state.enter("recovering", reason)

    def _join(self, worker: Worker) -> None:
        self._seats.sit(worker)
        self.mesh.add(worker)
        self._dirty = True

    def _miss(self, kind: Kind, seat: str, reason: str, final: bool) -> None:
        """The seat stays empty. final: all attempts have failed, each has been noted."""
        if not final:
            self._note_failed_join(seat, reason)
        seats, recovery = self._seats, self.settings.recovery
        if seats.miss(kind, seat) and (final or seats.tries[seat] > recovery.restarts):
            seats.given_up[seat] = kind
            self._post_later(recovery.rest_s, TryAgain(seat))

    def _note_failed_join(self, seat: str, reason: str) -> None:
        self.counts.failed_joins += 1
        self.last_error = f"{seat}: {reason}"
        _log.warning("%s", self.last_error)

    # --- one working epoch ----------------------------------------------------------------------

    def _repair(self) -> None:
        """Makes the present workers one epoch that holds every expert, if they can."""
        failure = ""
        for attempt in range(ATTEMPTS):
            self._hear_losses()
            joining = len(self.mesh.newcomers)
            try:
                self.mesh.form()
            except NoCapacity as error:
                self._dirty = False  # until somebody joins
                self._state.enter("unserviceable", self._state.because(str(error)))
                return
            except WorkerError as error:
                failure = str(error)
                _log.warning("no new epoch: %s", failure)
                if isinstance(error, HalfMoved):
                    self._catch_up(error, attempt)
                if self._back_out(failure):
                    continue
                return
            self.counts.joins += joining
            if self.status.state != "ready":
                self.counts.failovers += 1
                self.counts.recovery_s = time.monotonic() - self.status.since
            self._dirty = False
            self._state.enter("ready", "")
            self._settle()
            return
        if self.status.state != "ready":  # else the epoch before is as good as it was
            apart = f"the actors do not come together: {failure}"
            self._state.enter("unserviceable", self._state.because(apart))
        self._post_later(RETRY_S, Retry())

    def _catch_up(self, error: HalfMoved, attempt: int) -> None:
        """Those who have moved and those who have not need one epoch again. Who stays behind a
        second time is lost."""
        if self.status.state == "ready":
            self._state.enter("recovering", str(error))
        if attempt > 0:
            for worker in error.behind:
                if worker not in self.mesh.newcomers:
                    self._lose(worker, "does not move to the next epoch")

    def _hear_losses(self) -> None:
        """Whoever else was lost meanwhile must not be waited for."""
        while not self._inbox.empty():
            event = self._inbox.get()
            if event is None:
                self._inbox.put(None)
                return
            self._absorb(event)

    def _back_out(self, why: str) -> bool:
        """After a failed attempt newcomers go: the epoch before them worked, or will without them.

        Returns whether to try again; not when the old epoch is still there and right.
        """
        newcomers = self.mesh.newcomers
        for worker in newcomers:
            self.mesh.remove(worker)
            reason = f"{worker} did not come into the new epoch: {why}"
            self._miss(worker.kind, worker.seat, reason, final=False)
        self._end(newcomers)
        if newcomers and self.status.state == "ready" and not self._seats.released:
            self._dirty = False
            return False
        time.sleep(TICK_S)  # the watch may know by then who is to blame
        return True

    # --- the number of workers ------------------------------------------------------------------

    def _reconcile(self) -> None:
        kinds: tuple[Kind, Kind] = ("attention", "expert")
        for kind in kinds:
            here, coming = self._seats.here(kind), self._seats.coming(kind)
            missing = self._seats.short(kind)
            leaving = [w for w in self.mesh.workers if w.kind == kind and w in self._seats.leaving]
            for worker in leaving[: max(0, missing)]:
                self._seats.leaving.discard(worker)  # it is here already
                missing -= 1
            for _ in range(missing):
                self._fill(kind)
            self._seats.forget_surplus(kind)
            if missing < 0 and here and not coming and self.status.state == "ready":
                self._leave(here[-1])

    def _fill(self, kind: Kind) -> None:
        seat = self._seats.claim(kind)
        # Who was lost is replaced with patience.
        attempts = 1 + self.settings.recovery.restarts if seat in self._seats.tries else 1
        self._provisioner.fill(kind, seat, self._seats.bundles.get(seat), attempts)

    def _leave(self, worker: Worker) -> None:
        """An attention replica drains by itself; the copies of an expert actor are moved away by
        whoever plans the balance, who then posts Drained."""
        self._seats.leaving.add(worker)
        if worker.kind == "attention":
            self._provisioner.drain(worker, DRAIN_S)

    def _share(self, seat: str) -> Share:
        with self.lock:
            others = [share for other, share in self._seats.promised.items() if other != seat]
            share = self.mesh.share(self.loads, others, self._slots_when_whole())
            self._seats.promised[seat] = share
            return share

    def _slots_when_whole(self) -> int:
        """Slots per actor once all that are wanted are here: any one of them can be lost again."""
        actors = self._seats.desired["expert"]
        if self.settings.slots_per_actor is not None or actors == 0:
            return self.mesh.slots
        return self.settings.slots(self.mesh.ranks.experts, actors)

    def _settle(self) -> None:
        """There is a new epoch: who was waiting to be in it is, and who was waiting to go may."""
        if len(self.mesh.ranks.workers) >= self._seats.desired["expert"]:
            self.mesh.slots = self._slots_when_whole()
        for worker in self.mesh.workers:
            self._seats.tries.pop(worker.seat, None)
        released, self._seats.released = self._seats.released, []
        self._end(released)
        for worker in released:
            self._seats.vacate(worker.seat)

    def _end(self, workers: list[Worker]) -> None:
        if workers:
            threading.Thread(target=self._pool.end, args=(workers,), daemon=True).start()

    def _post_later(self, seconds: float, event: Event) -> None:
        timer = threading.Timer(seconds, self.post, (event,))
        timer.daemon = True
        timer.start()

    def _replicas(self) -> tuple[tuple[str, str], ...]:
        return tuple(
            (worker.seat, worker.member.name)
            for worker in tuple(self.mesh.attention)
            if worker not in self._seats.leaving
        )
