"""The workers of a mesh and the epoch they form: joining, losing, and making it whole again.

No thread and no clock of its own: the controller calls it with its lock held.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from expertmesh.cluster.balancing.recovery import NoCapacity
from expertmesh.cluster.epochs import form
from expertmesh.cluster.membership import Epoch, Worker
from expertmesh.cluster.placement import Placement
from expertmesh.cluster.ranks import ExpertRanks, Share, share_of_newcomer, with_copies
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.worker_pool import WorkerError, WorkerPool

# How long all attention ranks may take to use a new routing: a long step, and two messages.
FLIP_S = 12.0
FREE_S = 3.0


class Assembly:
    """attention and ranks: who is here, in rank order; epoch: the last one that was formed.

    The two differ between a loss or an arrival and the next `form`.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        pool: WorkerPool,
        attention: Sequence[Worker],
        ranks: ExpertRanks,
    ) -> None:
        """Workers that have loaded. Raises WorkerError when they do not come together in a first
        epoch."""
        self._settings, self._pool = settings, pool
        self.attention, self.ranks = list(attention), ranks
        self.slots = settings.slots(ranks.experts, settings.expert_actors)
        self.reloaded = 0  # copies read again because no survivor had one
        self._number, self._version = -1, -1
        # The first time all come from loading, and a busy machine may need its time.
        self.epoch = self._form(settings.exchange.join_deadline_s)

    @property
    def workers(self) -> list[Worker]:
        return [*self.attention, *self.ranks.workers]

    @property
    def newcomers(self) -> list[Worker]:
        """Those who are in no epoch yet."""
        return [worker for worker in self.workers if worker.member not in self.epoch.members]

    def add(self, worker: Worker) -> None:
        if worker.kind == "attention":
            self.attention.append(worker)
        else:
            self.ranks.add(worker)

    def remove(self, worker: Worker) -> None:
        """Gone, or about to go. Copies that only this worker had are missing until `form`."""
        if worker.kind == "attention":
            self.attention.remove(worker)
        else:
            self.ranks.remove(worker)

    def abort_epoch(self, reason: str) -> None:
        """Their own deadlines tell the survivors too; this is sooner and names the culprit."""
        for worker in self.attention:
            worker.handle.abort_epoch.remote(self.epoch.number, reason)

    def form(self) -> None:
        """Makes one epoch of all workers, with every expert in it.

        Raises NoCapacity when they cannot hold all experts, WorkerError when somebody fails.
        """
        if not self.attention:
            raise NoCapacity("no attention replica is left")
        if self.ranks.placement.held:  # else the experts are with the attention half
            self._seat_orphans()
        self.epoch = self._form(self._settings.recovery.meet_s)
        self._free_unplaced()

    def _form(self, limit_s: float) -> Epoch:
        self._number, self._version = self._number + 1, self._version + 1
        workers, placement = (self.attention, self.ranks.workers), self.ranks.placement
        return form(self._pool, self._number, self._version, *workers, placement, limit_s)

    def _seat_orphans(self) -> None:
        """Experts whose last copy was lost are loaded again by the workers that are left."""
        recovery, workers = self.ranks.recovery(self.slots), self.ranks.workers

        def ask(verb: str, shares: Mapping[int, Any], *more: Any) -> None:
            asked = [workers[rank] for rank in shares]
            calls = [
                getattr(worker.handle, verb).remote(share, *more)
                for worker, share in zip(asked, shares.values(), strict=True)
            ]
            self._pool.ask(asked, calls, verb.replace("_", " "), self._settings.load_timeout_s)

        # Known before it is done: if this attempt ends half-way, the next one must neither rely on
        # a copy that may be gone nor forget one that may have come.
        self.ranks.drop(recovery.drops)
        for rank, share in recovery.loads.items():
            workers[rank].held = with_copies(workers[rank].held, share)
        ask("drop", recovery.drops, self._version)
        ask("load_more", recovery.loads)
        self.reloaded += recovery.orphans
        self.ranks.placement = recovery.placement
        for rank, worker in enumerate(workers):
            worker.held = with_copies(worker.held, recovery.placement.of_actor(rank))

    def _free_unplaced(self) -> None:
        """Copies that the placement does not name any more."""
        unplaced = {}
        for rank, worker in enumerate(self.ranks.workers):
            placed = self.ranks.placement.of_actor(rank)
            extra = {
                layer: sorted(gone)
                for layer, ids in worker.held.items()
                if (gone := set(ids) - set(placed.get(layer, ())))
            }
            if extra:
                unplaced[worker] = extra
        self.free(unplaced)

    def free(self, copies: Mapping[Worker, Mapping[int, Sequence[int]]]) -> None:
        """Returns once the workers hold these copies no more: what is asked of them next, they
        must find done. A worker that does not answer is the watch's affair."""
        calls = []
        for worker, gone in copies.items():
            worker.held = {
                layer: tuple(set(ids) - set(gone.get(layer, ())))
                for layer, ids in worker.held.items()
            }
            calls.append(worker.handle.drop.remote(gone, self.epoch.version))
        self._pool.wait(calls, FREE_S)

    def flip(self, placement: Placement) -> bool:
        """Routes by `placement` from the next step on. Every copy it names must be in place.

        False: some ranks use it and some do not. Both are right, as all copies are there; but
        nothing may be dropped before a new epoch has started them all with the same.
        """
        self._version += 1
        new = replace(self.epoch, placement=placement, version=self._version)
        calls = [worker.handle.route.remote(new.routing()) for worker in self.attention]
        try:
            versions = self._pool.ask(self.attention, calls, "take the new routing", FLIP_S)
        except WorkerError:
            versions = [-1]
        self.ranks.placement = placement
        if any(version != new.version for version in versions):
            return False
        self.epoch = new
        return True

    def share(
        self, loads: Mapping[int, Any] | None, promised: Sequence[Share], slots: int
    ) -> Share:
        """What the next expert actor to join should load; see share_of_newcomer."""
        return share_of_newcomer(self.ranks, slots, loads, promised)
