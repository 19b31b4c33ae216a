"""Watches the routing for collapse: experts that die, layers that become narrow, NaN and Inf.

Every window of the ledger is shown to the detector. Rows that are not finite raise an alarm in the
same window. Counts are judged once they can tell something: windows are pooled until every layer
has MIN_HITS hits per expert, so that idle and near-idle windows neither raise alarms nor count as
windows. A collapse under usual load is found within two windows (the tests inject several kinds
and sizes); under little load as soon as the missing hits have added up.

False alarms come from drift, not from Poisson noise, so both tests measure drift and step back
from it: see dead_experts and entropy_drop. Both are corrected for testing L * E experts and L
layers in every window, and in simulation raise at most one false alarm in 10^4 windows of traffic
whose domains come, go and switch at once, with bursts and quiet spells.

An alarm is told once and stays active until its cause is gone: a hit on the dead expert, the
entropy back half-way, FINITE_WINDOWS without a NaN.
"""

from collections import Counter

import numpy as np

from expertmesh.cluster.ledger.alarms import MOST_NAMED, Alarm, Kind
from expertmesh.cluster.ledger.dead_experts import DeadExperts
from expertmesh.cluster.ledger.entropy_drop import EntropyDrops
from expertmesh.cluster.ledger.windows import Window

MIN_HITS = 64
FINITE_WINDOWS = 6
# How fast the usual load is learnt, and how much of a burst it believes.
_LOAD_STEP = 1 - 0.5 ** (1 / 8)
_BURST = 4.0


class CollapseDetector:
    """Not thread-safe: the ledger calls it under its lock."""

    def __init__(self, layers: tuple[int, ...], experts: int) -> None:
        """layers: absolute numbers, for the alarms."""
        self.raised: Counter[str] = Counter()  # alarms by kind, since the start
        self._layers = layers
        self._dead = DeadExperts(len(layers), experts)
        self._drops = EntropyDrops(len(layers), experts)
        self._least = MIN_HITS * experts
        self._pool_LE = np.zeros((len(layers), experts), np.int64)
        self._usual = 0.0
        self._broken: dict[Kind, np.ndarray] = {  # windows that the alarm is still active
            "router_nonfinite": np.zeros(len(layers), np.int64),
            "expert_nonfinite": np.zeros(len(layers), np.int64),
        }

    @property
    def dead_LE(self) -> np.ndarray:
        """bool [L, E]: experts in alarm."""
        return self._dead.dead_LE

    def active(self) -> dict[str, int]:
        """Alarms that hold now: dead experts one by one, the other kinds by layers."""
        counts = {str(kind): int((left_L > 0).sum()) for kind, left_L in self._broken.items()}
        counts["dead_expert"] = int(self.dead_LE.sum())
        counts["entropy_drop"] = int(self._drops.fallen_L.sum())
        return counts

    def observe(self, window: Window) -> list[Alarm]:
        """The alarms that this window raises."""
        # A row whose weights are not finite has no finite sum either: that is not the experts'.
        bad_sums_L = np.maximum(window.bad_rows_L - window.bad_weights_L, 0)
        alarms = self._finite("router_nonfinite", window.bad_weights_L)
        alarms += self._finite("expert_nonfinite", bad_sums_L)
        self._pool_LE += window.hits_LE
        if int(self._pool_LE.sum(1).min()) >= self._least:
            alarms += self._judge(self._pool_LE)
            self._pool_LE = np.zeros_like(self._pool_LE)
        self.raised.update(alarm.kind for alarm in alarms)
        return alarms

    def _finite(self, kind: Kind, bad_L: np.ndarray) -> list[Alarm]:
        left_L = self._broken[kind]
        fresh_L = (bad_L > 0) & (left_L == 0)
        self._broken[kind] = np.where(bad_L > 0, FINITE_WINDOWS, np.maximum(left_L - 1, 0))
        return [Alarm(kind, self._layers[i], float(bad_L[i]), 0.0) for i in np.flatnonzero(fresh_L)]

    def _judge(self, hits_LE: np.ndarray) -> list[Alarm]:
        load = float(hits_LE.sum())
        self._usual = self._usual or load
        age = min(1.0, load / self._usual)
        self._usual += _LOAD_STEP * age * (min(load, _BURST * self._usual) - self._usual)
        alarms = [
            self._died(i, np.flatnonzero(died_E))
            for i, died_E in enumerate(self._dead.observe(hits_LE, age))
            if died_E.any()
        ]
        for i in np.flatnonzero(self._drops.observe(hits_LE, age)):
            now, usual = float(self._drops.now_L[i]), float(self._drops.usual_L[i])
            alarms.append(Alarm("entropy_drop", self._layers[i], now, usual))
        return alarms

    def _died(self, index: int, experts_N: np.ndarray) -> Alarm:
        least = min(self._dead.expected(index, int(expert)) for expert in experts_N)
        named = tuple(experts_N[:MOST_NAMED].tolist())
        layer = self._layers[index]
        return Alarm("dead_expert", layer, 0.0, least, named, len(experts_N))
