"""The epochs an expert actor serves: the running one, and beside it the next until that takes over.

Each has its own server and thread over the one bank.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import LayerWork, MeshServer
from expertmesh.actors.process import Pulse

_log = logging.getLogger(__name__)

# A request that breaks whatever computes it is ended after a few epochs (cluster/controller.py).
# An actor that fails for longer without having computed anything in between is broken itself.
FAULTS = 6


@dataclass
class Work:
    """What serving has cost, over all epochs. layers: by absolute layer number."""

    steps: int = 0
    layers: dict[int, LayerWork] = field(default_factory=dict)

    def add(self, steps: int, layers: Mapping[int, LayerWork]) -> None:
        self.steps += steps
        for layer, done in layers.items():
            total = self.layers.setdefault(layer, LayerWork())
            total.rows += done.rows
            total.calls += done.calls
            total.busy_s += done.busy_s


class Epochs:
    """All methods from any thread."""

    def __init__(self, meet: Callable[[Roster, int], MeshServer]) -> None:
        """meet: meets the other ranks of an epoch; raises ExchangeError."""
        self._meet = meet
        self._lock = threading.Lock()  # guards all below
        self._running: dict[int, MeshServer] = {}
        self._live: list[MeshServer] = []  # also those told to end that have not yet
        self._ended: dict[int, str] = {}  # epoch -> why, unless it had been replaced
        self._oldest = 0
        self._discarded: set[int] = set()
        self._past = Work()
        self._faults = 0  # epochs in a row that ended by a failure of this actor's own

    def prepare(self, roster: Roster, rank: int) -> None:
        """Meets the other ranks and serves them at once. Raises ExchangeError; nothing of the epoch
        is left then."""
        self._refuse_unwanted(roster, rank)
        server = self._meet(roster, rank)
        with self._lock:
            wanted = self._wanted(roster.epoch)
            if wanted:
                self._running[roster.epoch] = server
                self._live.append(server)
        if not wanted:
            server.close()
            self._refuse_unwanted(roster, rank)
        name = f"expert-epoch-{roster.epoch}"
        threading.Thread(
            target=self._serve, args=(roster.epoch, server), name=name, daemon=True
        ).start()

    def retire(self, below: int) -> None:
        """Ends every epoch older than `below`; that is no failure."""
        with self._lock:
            self._oldest = max(self._oldest, below)
            self._discarded = {epoch for epoch in self._discarded if epoch >= below}
            self._ended = {epoch: why for epoch, why in self._ended.items() if epoch >= below}
            leaving = [self._running.pop(epoch) for epoch in [*self._running] if epoch < below]
        for server in leaving:
            server.close()

    def discard(self, epoch: int) -> None:
        """Ends an epoch that shall not be used, or that is still being met."""
        with self._lock:
            if epoch >= self._oldest:
                self._discarded.add(epoch)
            self._ended.pop(epoch, None)
            server = self._running.pop(epoch, None)
        if server is not None:
            server.close()

    def require_version(self, version: int) -> None:
        """From now on a step that uses an older routing version is an error of that step."""
        with self._lock:
            for server in self._running.values():
                server.version_floor = max(server.version_floor, version)

    def pulse(self) -> Pulse:
        with self._lock:
            if self._faults >= FAULTS:
                why = self._ended.get(max(self._ended, default=-1), "see its log")
                return Pulse(stuck=f"its experts have failed {self._faults} times in a row: {why}")
            if self._running:
                return Pulse(max(self._running))
            if self._ended:
                epoch = max(self._ended)
                return Pulse(epoch, broken=self._ended[epoch])
            return Pulse()

    @property
    def steps(self) -> int:
        """Served so far, over all epochs."""
        with self._lock:
            return self._past.steps + sum(server.steps for server in self._live)

    def work(self) -> Work:
        with self._lock:
            total = Work()
            total.add(self._past.steps, self._past.layers)
            for server in self._live:
                total.add(server.steps, server.work)
        return total

    def close(self) -> None:
        """Ends all of them."""
        with self._lock:
            newest = max([self._oldest - 1, *self._running])
        self.retire(newest + 1)

    def _serve(self, epoch: int, server: MeshServer) -> None:
        own_fault = False
        try:
            server.run()
            reason = "the attention side has ended the epoch"
        except Exception as error:
            own_fault = not isinstance(error, ExchangeError)
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            if any(done.calls for done in server.work.values()):
                self._faults = 0
            self._faults += own_fault
            self._live.remove(server)
            self._past.add(server.steps, server.work)
            told_to = self._running.pop(epoch, None) is None
            if not told_to:
                self._ended[epoch] = reason
            level = logging.INFO if told_to or self._running else logging.WARNING
        _log.log(level, "epoch %d has ended here: %s", epoch, reason)

    def _wanted(self, epoch: int) -> bool:
        return epoch >= self._oldest and epoch not in self._discarded

    def _refuse_unwanted(self, roster: Roster, rank: int) -> None:
        with self._lock:
            if self._wanted(roster.epoch):
                return
        raise ExchangeError(rank, -1, "join", -1, f"epoch {roster.epoch} is no longer wanted")
