"""What is done to a mesh that works: watch its traffic, keep it balanced, let leaving actors go."""

import logging
import threading
import time

from expertmesh.actors.model.config import ModelConfig
from expertmesh.cluster.balancing.plan import BalanceError, Plan
from expertmesh.cluster.balancing.planner import balance
from expertmesh.cluster.controller import Controller
from expertmesh.cluster.events import Drained
from expertmesh.cluster.groups.types import Groups
from expertmesh.cluster.mover import Mover, PlanAbandoned
from expertmesh.cluster.scaling_loop import ScalingLoop
from expertmesh.cluster.settings import ClusterSettings
from expertmesh.cluster.traffic import Traffic
from expertmesh.cluster.worker_pool import WorkerPool

_log = logging.getLogger(__name__)

WINDOW_S = 10.0
TICK_S = 0.25
# After an abandoned plan the mesh is left alone for a while.
PAUSE_S = 2.0


class Upkeep:
    """A thread that closes windows of the ledger and carries out plans, one at a time."""

    def __init__(
        self,
        settings: ClusterSettings,
        config: ModelConfig,
        controller: Controller,
        pool: WorkerPool,
        groups: Groups | None = None,
    ) -> None:
        """groups: experts that should rather stay together."""
        self._settings, self._controller, self._groups = settings, controller, groups
        self.traffic = Traffic(config, controller, settings.load.model.name)
        self.mover = Mover(controller, pool, settings.rebalance.transfer_s)
        self.scaling: ScalingLoop | None = None
        if settings.autoscale is not None:
            self.scaling = ScalingLoop(settings.autoscale, controller, self.traffic)
        self._window = self._looked = self._steered = time.monotonic()
        self._planned_for = -1  # the epoch whose placement was last looked at
        self._asked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="mesh-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.mover.stop()
        self._thread.join(self._settings.rebalance.transfer_s)

    def plan(self) -> Plan | None:
        """What a rebalance would do now; None when there is nothing to balance."""
        with self._controller.lock:
            mesh = self._controller.mesh
            if len(mesh.ranks.workers) < 2 or not mesh.ranks.whole:
                return None
            old, slots, leaving = mesh.ranks.placement, mesh.slots, self._leaving_ranks()
        loads = self.traffic.loads(self._settings.rebalance.least_tokens)
        return balance(loads, old, slots=slots, leaving=leaving, groups=self._groups)

    def rebalance(self) -> None:
        """Asks for a plan to be made and carried out soon, whatever the settings say."""
        self._asked.set()

    def _leaving_ranks(self) -> frozenset[int]:
        ranks = self._controller.mesh.ranks
        return frozenset(
            ranks.rank_of(worker)
            for worker in self._controller.leaving()
            if worker.kind == "expert"
        )

    def _main(self) -> None:
        while not self._stopping.wait(TICK_S):
            try:
                self._look(time.monotonic())
            except PlanAbandoned as error:
                if not self._stopping.is_set():
                    _log.warning("rebalance given up: %s", error)
                self._stopping.wait(PAUSE_S)
            except Exception:
                _log.exception("upkeep stumbled")
                self._stopping.wait(PAUSE_S)

    def _look(self, now: float) -> None:
        if now - self._window >= WINDOW_S:
            self._window = now
            self.traffic.close_window()
        if self.scaling is not None and now - self._steered >= self.scaling.settings.period_s:
            self._steered = now
            self.scaling.steer()
        if self._controller.status.state == "ready" and self._is_due(now):
            self._carry_out()

    def _is_due(self, now: float) -> bool:
        settings, controller = self._settings.rebalance, self._controller
        with controller.lock:
            if self._leaving_ranks():
                return True
            changed = controller.mesh.epoch.number != self._planned_for
        if self._asked.is_set() or (changed and settings.fill_spares):
            return True
        return settings.period_s > 0 and now - self._looked >= settings.period_s

    def _carry_out(self) -> None:
        controller, settings = self._controller, self._settings.rebalance
        with controller.lock:
            epoch, slots = controller.mesh.epoch, controller.mesh.slots
            # A copy: the list itself changes when one is lost, and ranks mean others then.
            workers, leaving = list(controller.mesh.ranks.workers), self._leaving_ranks()
        needed = self._asked.is_set() or bool(leaving) or epoch.number != self._planned_for
        self._asked.clear()
        self._looked = time.monotonic()
        try:
            plan = self.plan()
        except BalanceError as error:
            _log.warning("no plan: %s", error)
            self._stopping.wait(PAUSE_S)
            return
        if plan is None or plan.old.actors != len(workers):
            return  # nothing to do, or the ranks have changed since
        if (needed or plan.before > settings.trigger) and (plan.moves or plan.drops):
            self.mover.carry_out(plan, epoch.number, workers, slots)
        self._planned_for = epoch.number
        for rank in leaving:
            controller.post(Drained(workers[rank]))
