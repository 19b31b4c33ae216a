"""What operators ask of a mesh, and get: its status, another size, a rebalance. Plain data only."""

import re
import time
from typing import Any

from expertmesh.cluster.balancing.plan import Plan
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.directory import ScaleError
from expertmesh.cluster.membership import Epoch, Kind, Worker
from expertmesh.cluster.mesh_state import Status
from expertmesh.cluster.mover import Mover
from expertmesh.cluster.ranks import Share

# A recovery that reads experts from disk takes much longer than a look may.
LOCK_S = 2.0

Wish = int | str | None
_RELATIVE = re.compile(r"[+-]\d{1,4}")
_NUMBER = re.compile(r"\d{1,9}")


def status(controller: Controller, mover: Mover) -> dict[str, Any]:
    """State, members and what has happened; for GET /mesh."""
    leaving = controller.leaving()
    epoch, state, replicas, held = _members(controller)
    attention = [_member(worker, leaving) for worker in replicas]
    experts = [
        {**_member(worker, leaving), "experts_per_layer": max(map(len, layers.values()), default=0)}
        for worker, layers in held.items()
    ]
    desired = controller.desired()
    counts, moves = controller.counts, mover.moves
    since = None if moves.finished_at is None else round(time.monotonic() - moves.finished_at, 1)
    return {
        "state": state.state,
        "reason": state.reason,
        "epoch": epoch.number,
        "routing_version": epoch.version,
        "slots_per_actor": controller.mesh.slots,
        "desired": {"attention": desired["attention"], "experts": desired["expert"]},
        "attention": attention,
        "experts": experts,
        "losses": counts.losses,
        "last_loss": controller.last_loss,
        "failovers": counts.failovers,
        "last_recovery_seconds": round(counts.recovery_s, 3),
        "reloaded_experts": controller.mesh.reloaded,
        "joins": counts.joins,
        "failed_joins": counts.failed_joins,
        "last_error": controller.last_error,
        "rebalances": moves.plans,
        "failed_rebalances": moves.failed,
        "moved_experts": moves.copies,
        "seconds_since_rebalance": since,
        "last_rebalance_error": moves.last_error,
    }


def _members(controller: Controller) -> tuple[Epoch, Status, list[Worker], dict[Worker, Share]]:
    """Also the attention replicas, and the expert actors with what they hold."""
    mesh, sure = controller.mesh, controller.lock.acquire(timeout=LOCK_S)
    try:
        epoch, placement, state = mesh.epoch, mesh.ranks.placement, controller.status
        replicas, actors = list(mesh.attention), list(mesh.ranks.workers)
    finally:
        if sure:
            controller.lock.release()
    if sure:
        return epoch, state, replicas, {w: placement.of_actor(r) for r, w in enumerate(actors)}
    # An epoch is forming: of the last one, those who are left.
    replicas = [worker for worker in replicas if worker.member in epoch.attention]
    ranks = {w: epoch.experts.index(w.member) for w in actors if w.member in epoch.experts}
    return epoch, state, replicas, {w: epoch.placement.of_actor(r) for w, r in ranks.items()}


def scale(controller: Controller, experts: Wish, attention: Wish, dry_run: bool) -> dict[str, Any]:
    """Numbers, or "+1" and "-1" relative to the present wish. Raises ScaleError.

    Returns at once with what will be; GET /mesh shows how far it is.
    """
    if experts is None and attention is None:
        raise ScaleError("give experts or attention", "experts")
    with controller.wishing():  # of two "+1" at the same time, each counts
        before = controller.desired()
        wanted: dict[Kind, int | None] = {
            "expert": _number(experts, before["expert"], "experts"),
            "attention": _number(attention, before["attention"], "attention"),
        }
        controller.scale(wanted["expert"], wanted["attention"], dry_run)
    after = {kind: before[kind] if new is None else new for kind, new in wanted.items()}
    return {
        "dry_run": dry_run,
        "experts": {"from": before["expert"], "to": after["expert"]},
        "attention": {"from": before["attention"], "to": after["attention"]},
    }


def rebalance(plan: Plan | None, dry_run: bool) -> dict[str, Any]:
    """A plan in numbers."""
    if plan is None:
        return {"dry_run": dry_run, "moves": 0, "drops": 0, "imbalance": None}
    return {
        "dry_run": dry_run,
        "moves": len(plan.moves),
        "drops": len(plan.drops),
        "imbalance": {"before": round(plan.before, 4), "after": round(plan.after, 4)},
    }


def _member(worker: Worker, leaving: frozenset[Worker]) -> dict[str, Any]:
    member = worker.member
    return {
        "seat": worker.seat,
        "actor": member.name,
        "pid": member.pid,
        "host": member.hostname,
        "address": member.address,
        "leaving": worker in leaving,
    }


def _number(wish: Wish, now: int, field: str) -> int | None:
    if wish is None or (isinstance(wish, int) and not isinstance(wish, bool)):
        return wish
    if isinstance(wish, str) and _RELATIVE.fullmatch(wish):
        return now + int(wish)
    if isinstance(wish, str) and _NUMBER.fullmatch(wish):
        return int(wish)
    raise ScaleError(f'{field}: a number or a change like "+1", not {wish!r}', field)
