"""The ledger of a mesh: which experts are hit, by whom they are carried, and whether that is sane.

L MoE layers, E experts. Every window it takes in counters of the attention replicas and of the
expert actors, in any order; old windows fade with a half-life. Memory is a few arrays [L, E] and
one more per replica: 0.7 MB each at K3's shape.

A quiet window fades the past less: with a share s of the usual hits it ages it by s windows, so
that a night of a few odd requests does not replace what a day has taught. An idle one changes
nothing.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from expertmesh.actors.exchange.counting import RoutingSnapshot
from expertmesh.cluster.ledger.actors import Seats
from expertmesh.cluster.ledger.alarms import Alarm
from expertmesh.cluster.ledger.collapse import CollapseDetector
from expertmesh.cluster.ledger.measures import entropy, imbalance, layer_rank_loads
from expertmesh.cluster.ledger.overview import Overview, layer_overviews
from expertmesh.cluster.ledger.report import ActorReport, Report, layer_reports
from expertmesh.cluster.ledger.stats import ActorLoad, RoutingStats
from expertmesh.cluster.ledger.windows import Sources, Window
from expertmesh.cluster.placement import Placement

_log = logging.getLogger(__name__)


class Ledger:
    """Thread-safe. The keeper feeds it and closes its windows; anyone may read."""

    def __init__(
        self,
        layers: tuple[int, ...],
        experts: int,
        top_k: int,
        *,
        half_life: float = 8.0,
    ) -> None:
        """layers: absolute numbers of the MoE layers. half_life: in windows."""
        self.layers, self.experts, self.top_k = layers, experts, top_k
        self.half_life = half_life
        self._decay = 0.5 ** (1 / half_life)
        self._lock = threading.Lock()
        self._sources = Sources(layers, experts, top_k)
        self._seats = Seats(layers, self._decay)
        self._detector = CollapseDetector(layers, experts)
        self._open = Window.empty(len(layers), experts)
        self._hits_LE = np.zeros((len(layers), experts))
        self._rows_sent = self._seconds = 0.0
        self._windows, self._closed = 0, time.monotonic()

    # --- feeding ------------------------------------------------------------------------------

    def add(self, snapshot: RoutingSnapshot, rows_sent: int = 0) -> None:
        """Counters of one attention replica. rows_sent: its exchange's, over all expert actors.

        Raises ValueError when the snapshot has another model's shape.
        """
        with self._lock:
            self._open += self._sources.advance(snapshot, rows_sent)

    def add_actor(
        self,
        seat: str,
        rows: Mapping[int, int],
        busy_seconds: Mapping[int, float],
    ) -> None:
        """Counters of the expert actor in `seat`, by absolute layer number, as its stats have them.

        A restart is noticed by a counter that went back.
        """
        with self._lock:
            self._seats.add(seat, rows, busy_seconds)

    def keep_actors(self, seats: Collection[str]) -> None:
        """The seats of the mesh as it is: nothing of any other is reported from now on."""
        with self._lock:
            self._seats.keep(seats)

    def close_window(self, seconds: float | None = None) -> list[Alarm]:
        """Takes the open window into the past; returns the alarms it has raised (also logged).

        seconds: how long it was open; unset: since the last call.
        """
        with self._lock:
            now = time.monotonic()
            seconds = now - self._closed if seconds is None else seconds
            window, self._closed = self._open, now
            self._open = Window.empty(len(self.layers), self.experts)
            decay = self._decay ** self._age(window.hits)
            self._hits_LE *= decay
            self._hits_LE += window.hits_LE
            self._rows_sent = self._rows_sent * decay + window.rows_sent
            self._seats.close_window()
            self._seconds = self._seconds * self._decay + seconds
            self._windows += 1
            alarms = self._detector.observe(window)
        for alarm in alarms:
            _log.warning("routing alarm: %s", alarm.line())
        return alarms

    def _age(self, hits: int) -> float:
        """By how many windows a window with so many hits ages the past, 0 to 1."""
        usual = float(self._hits_LE.sum()) * (1 - self._decay)
        return min(1.0, hits / usual) if usual > 0 else 1.0

    # --- reading ------------------------------------------------------------------------------

    @property
    def windows(self) -> int:
        """How many have been closed."""
        return self._windows

    def loads(self) -> np.ndarray:
        """float64 [L, E]: decayed hits, in the order of `layers`. A copy, for the balancer."""
        with self._lock:
            return self._hits_LE.copy()

    def actor_loads(self) -> list[ActorLoad]:
        """Totals by seat, for the metrics. They never go back."""
        with self._lock:
            return self._seats.totals()

    def busy_share(self) -> dict[str, float]:
        """seat -> share of the recent time its actor has computed, 0 to 1."""
        with self._lock:
            return {seat: share for seat, _, share in self._recent_actors()}

    def _recent_actors(self) -> list[tuple[str, float, float]]:
        """(seat, recent rows, busy share)."""
        seconds = self._seconds
        return [
            (seat, float(rows.sum()), min(1.0, float(busy.sum()) / seconds) if seconds else 0.0)
            for seat, (rows, busy) in self._seats.recent().items()
        ]

    def routing_stats(self, placement: Placement | None) -> RoutingStats:
        """For the metrics. placement: None without an expert tier."""
        with self._lock:
            hits_LE, detector = self._hits_LE.copy(), self._detector
            alarms, active, dead = dict(detector.raised), detector.active(), detector.dead_LE
            dead_experts = int(dead.sum())
        loaded = hits_LE[hits_LE.sum(1) > 0]
        ranks_LA = layer_rank_loads(hits_LE, self.layers, placement)
        balanced = [1 / ratio for ranks_A in ranks_LA if (ratio := imbalance(ranks_A)) is not None]
        return RoutingStats(
            balancedness_worst=min(balanced, default=None),
            balancedness_mean=sum(balanced) / len(balanced) if balanced else None,
            entropy_min=float(entropy(loaded).min()) if len(loaded) else None,
            dead_experts=dead_experts,
            alarms=alarms,
            alarms_active=active,
        )

    def overview(self, placement: Placement | None, seats: Sequence[str]) -> Overview:
        """For the dashboard page. seats: of the placement's actors, by rank."""
        with self._lock:
            hits_LE, dead_LE = self._hits_LE.copy(), self._detector.dead_LE.copy()
            rows_sent, windows = self._rows_sent, self._windows
            alarms = self._detector.active()
        return Overview(
            windows=windows,
            experts=self.experts,
            top_k=self.top_k,
            seats=list(seats),
            fan_out=self._fan_out(hits_LE, rows_sent),
            layers=layer_overviews(self.layers, hits_LE, placement, dead_LE),
            alarms=alarms,
        )

    def _fan_out(self, hits_LE: np.ndarray, rows_sent: float) -> float | None:
        """Distinct expert actors per token and layer."""
        routed = float(hits_LE.sum()) / self.top_k
        return rows_sent / routed if routed and rows_sent else None

    def report(self, placement: Placement | None, model: str = "") -> Report:
        """Everything the ledger knows, ready for JSON. placement: None without an expert tier."""
        with self._lock:
            hits_LE, dead_LE = self._hits_LE.copy(), self._detector.dead_LE.copy()
            rows_sent, windows = self._rows_sent, self._windows
            actors = [ActorReport(*one) for one in self._recent_actors()]
            alarms = self._detector.active()
        return Report(
            model=model,
            experts=self.experts,
            top_k=self.top_k,
            windows=windows,
            half_life=self.half_life,
            fan_out=self._fan_out(hits_LE, rows_sent),
            layers=layer_reports(self.layers, hits_LE, placement, dead_LE),
            actors=actors,
            alarms=alarms,
        )
