"""Making an epoch: all ranks meet beside the running one, then everybody moves over."""

import contextlib
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayError

from expertmesh.cluster.membership import Epoch, Worker
from expertmesh.cluster.placement import Placement
from expertmesh.cluster.worker_pool import WorkerError, WorkerPool


class HalfMoved(WorkerError):
    """Some attention ranks are in the new epoch and some are not: neither epoch works any more."""

    def __init__(self, message: str, behind: Sequence[Worker]) -> None:
        super().__init__(message)
        self.behind = tuple(behind)


def form(
    pool: WorkerPool,
    number: int,
    version: int,
    attention: Sequence[Worker],
    experts: Sequence[Worker],
    placement: Placement,
    meet_s: float,
) -> Epoch:
    """Makes epoch `number` of these workers, in rank order, and moves everybody into it.

    Until all have met, the present epoch goes on serving, and a failure leaves it as it was. Then
    each attention rank moves to the new one and sends again what it had in flight in the old one.
    version: of the routing that the placement is. Numbers and versions only ever grow. Raises
    WorkerError; HalfMoved when the present epoch is not as it was.
    """
    everybody = [*attention, *experts]
    members = tuple(w.member for w in attention), tuple(w.member for w in experts)
    try:
        store = ("", 0)
        if experts:
            opened = attention[0].handle.open_store.remote(number)
            (store,) = pool.ask(attention[:1], [opened], "open a store", meet_s)
        epoch = Epoch(number, *members, placement, store, version)
        # The whole placement, once instead of per actor.
        roster = pool.share(epoch.roster(meet_s)) if experts else None
        calls = [worker.handle.prepare.remote(roster, r) for r, worker in enumerate(everybody)]
        pool.ask(everybody, calls, f"join epoch {number}", meet_s)
    except WorkerError:
        for worker in everybody:
            with contextlib.suppress(RayError):
                worker.handle.discard.remote(number)
        raise
    # No way back from here: whoever does not follow has to be left behind in the next one.
    calls = [worker.handle.switch.remote(number) for worker in attention]
    try:
        pool.ask(attention, calls, f"move to epoch {number}", meet_s)
    except WorkerError as error:
        behind = [w for w, call in zip(attention, calls, strict=True) if not _done(pool, w, call)]
        raise HalfMoved(str(error), behind) from error
    for worker in experts:
        worker.handle.retire.remote(number)
    return epoch


def _done(pool: WorkerPool, worker: Worker, call: Any) -> bool:
    try:
        pool.ask([worker], [call], "move", 0.0)
    except WorkerError:
        return False
    return True
