"""Carrying out a plan under traffic: copy, verify, flip the routing, forget; wave by wave."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from expertmesh.cluster.balancing.plan import Drop, Move, Plan
from expertmesh.cluster.balancing.waves import Wave, schedule
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.membership import Worker
from expertmesh.cluster.ranks import with_copies
from expertmesh.cluster.worker_pool import WorkerError, WorkerPool


class PlanAbandoned(RuntimeError):
    """The rest of a plan was given up; what was routed is still right. Says why."""


@dataclass
class Moves:
    """What has been moved since the mesh started."""

    plans: int = 0
    failed: int = 0
    copies: int = 0
    running: bool = False
    finished_at: float | None = None  # monotonic
    last_error: str = ""


class Mover:
    """Executes plans one at a time, from the thread that calls it.

    Never holds up a step: copies travel between the actors' side threads, and a flip only says
    which of two complete sets of copies the next steps use.
    """

    def __init__(self, controller: Controller, pool: WorkerPool, transfer_s: float) -> None:
        self._controller, self._pool, self._transfer_s = controller, pool, transfer_s
        self.moves = Moves()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """The plan that is being carried out ends after its present wave, and no other begins."""
        self._stopping.set()

    def carry_out(self, plan: Plan, epoch: int, workers: Sequence[Worker], slots: int) -> None:
        """Makes the plan's placement the one in use. workers: by expert rank, in that epoch.

        Raises PlanAbandoned when a copy fails or the epoch ends; nothing half-moved is routed.
        """
        self.moves.running = True
        try:
            for wave in schedule(plan, plan.old, slots):
                if self._stopping.is_set():
                    raise PlanAbandoned("the mesh is stopping")
                self._wave(wave, epoch, workers)
        except PlanAbandoned as error:
            self.moves.failed += 1
            self.moves.last_error = str(error)
            raise
        finally:
            self.moves.running = False
        self.moves.plans += 1
        self.moves.finished_at = time.monotonic()

    def _wave(self, wave: Wave, epoch: int, workers: Sequence[Worker]) -> None:
        staged: list[Move] = []
        try:
            for batch in wave.rounds:
                staged += batch  # also what a failing round has brought
                self._copy(batch, workers)
            flipped = self._controller.flip(epoch, wave.placement)
        except WorkerError as error:
            self._forget(_drops_of(staged), workers)
            raise PlanAbandoned(str(error)) from error
        if not flipped:
            self._forget(_drops_of(staged), workers)
            raise PlanAbandoned(f"epoch {epoch} ended while copies were on their way")
        self.moves.copies += len(staged)
        self._forget(wave.drops, workers)

    def _copy(self, batch: Iterable[Move], workers: Sequence[Worker]) -> None:
        """One round: every actor talks to one peer. Returns when all copies are verified."""
        targets, calls = [], list[Any]()
        for move in batch:
            target, source = workers[move.target], workers[move.source]
            with self._controller.lock:
                target.held = with_copies(target.held, {move.layer: (move.expert,)})
            targets.append(target)
            calls.append(
                target.handle.adopt.remote(
                    move.layer, move.expert, source.handle, self._transfer_s, source.member.name
                )
            )
        try:
            self._pool.ask(targets, calls, "adopt an expert", self._transfer_s + 5.0)
        except WorkerError:
            # What is still on its way must have landed before it can be forgotten.
            self._pool.wait(calls, self._transfer_s)
            raise

    def _forget(self, drops: Iterable[Drop], workers: Sequence[Worker]) -> None:
        """Frees copies, unless the placement of this moment names them: it may have changed since,
        and a recovery may rely on what a plan has just brought."""
        mesh = self._controller.mesh
        by_actor: dict[int, dict[int, list[int]]] = {}
        for layer, expert, actor in drops:
            by_actor.setdefault(actor, {}).setdefault(layer, []).append(expert)
        with self._controller.lock:
            unwanted: dict[Worker, dict[int, list[int]]] = {}
            for actor, copies in by_actor.items():
                worker = workers[actor]
                if worker in mesh.ranks.workers:
                    placed = mesh.ranks.placement.of_actor(mesh.ranks.rank_of(worker))
                    unwanted[worker] = {
                        i: sorted(set(ids) - set(placed[i])) for i, ids in copies.items()
                    }
            mesh.free(unwanted)


def _drops_of(moves: Iterable[Move]) -> list[Drop]:
    return [Drop(move.layer, move.expert, move.target) for move in moves]
