"""Layers whose routing has become narrow. L MoE layers, E experts.

Watched is the normalised entropy of a layer's shares in a window (0 to 1, corrected for the bias of
few hits) against its usual value. Two things make it fall that are no collapse: chance, and other
traffic, which moves the shares of all layers in the same window. So a layer's own fall is what
exceeds the median fall of all layers, and an alarm needs of it at least

    LEAST_FALL, 6 standard deviations, 1.5 times the largest of late, and MOVED_FALL times the
    median over the layers of how far shares have moved (total variation): a domain that all
    layers feel may be a narrow one for some,

in two windows in a row. When all layers fall together, as when the model's input is broken, they
must fall by GLOBAL_FALL. With fewer sequences than usual a window varies more, like the root of
their number; one with much less than the usual load is not judged.
"""

import numpy as np

from expertmesh.cluster.ledger.measures import entropy

LEAST_FALL = 0.05
GLOBAL_FALL = 0.25
# How far a move of all layers' shares (total variation) may lower the entropy of one.
MOVED_FALL = 0.75
# Weight of a window's load against the usual, from which on its entropy is judged.
LEAST_AGE = 0.25
WARM_WINDOWS = 8
FIRST_SIGMA = 0.03
_SPREAD_DECAY = 0.5 ** (1 / 64)
_PEAK_DECAY = 0.5 ** (1 / 256)
# A layer in alarm follows the traffic so much more slowly: it would take the collapse for usual.
_ALARMED = 1 / 16


class EntropyDrops:
    """Tests windows of hits one after the other."""

    def __init__(self, layers: int, experts: int, half_life: float = 8.0) -> None:
        """half_life: of the usual entropy, in windows of usual load."""
        self.fallen_L = np.zeros(layers, bool)
        self.now_L = np.ones(layers)
        self.usual_L = np.ones(layers)
        self._share_LE = np.zeros((layers, experts))
        self._decay = 0.5 ** (1 / half_life)
        self._variance_L = np.full(layers, FIRST_SIGMA**2)
        self._peak_L = np.zeros(layers)
        self._before_L = np.zeros(layers)  # strength of the last window's fall
        self._windows = 0

    def observe(self, hits_LE: np.ndarray, age: float) -> np.ndarray:
        """bool [L]: layers that have collapsed by this window's evidence, each told once.

        age: weight of the window against a usual one, 0 to 1. Every layer must have hits.
        """
        if age < LEAST_AGE:
            return np.zeros_like(self.fallen_L)
        now_L = _corrected_entropy(hits_LE)
        self.now_L = now_L
        self._windows += 1
        share_LE = hits_LE / hits_LE.sum(1, keepdims=True)
        if self._windows == 1:
            self.usual_L, self._share_LE = now_L, share_LE
        moved = float(np.median(np.abs(share_LE - self._share_LE).sum(1))) / 2
        fall_L = (self.usual_L - now_L) * np.sqrt(age)
        common = float(np.median(fall_L)) if len(fall_L) > 2 else 0.0
        own_L = fall_L - common
        limit_L = np.maximum(6 * np.sqrt(self._variance_L), 1.5 * self._peak_L)
        limit_L = np.maximum(limit_L, max(LEAST_FALL, MOVED_FALL * moved))
        strength_L = np.maximum(own_L / limit_L, fall_L / GLOBAL_FALL if common else 0.0)
        if len(fall_L) <= 2:
            strength_L = fall_L / np.maximum(limit_L, GLOBAL_FALL)
        judged = self._windows > WARM_WINDOWS
        twice_L = np.minimum(strength_L, self._before_L) >= 1
        fresh_L: np.ndarray = twice_L & ~self.fallen_L & judged
        self.fallen_L = (self.fallen_L | fresh_L) & (strength_L >= 0.5)
        self._before_L = strength_L
        suspect_L = strength_L >= 1
        self._learn(now_L, share_LE, own_L, suspect_L, age)
        return fresh_L

    def _learn(
        self,
        now_L: np.ndarray,
        share_LE: np.ndarray,
        own_L: np.ndarray,
        suspect_L: np.ndarray,
        age: float,
    ) -> None:
        step = 1 - self._decay**age
        if self._windows <= WARM_WINDOWS:
            step = max(step, 1 / self._windows)
            suspect_L = np.zeros_like(suspect_L)
        step_L = np.where(suspect_L, step * _ALARMED, step)
        self.usual_L = self.usual_L + step_L * (now_L - self.usual_L)
        self._share_LE = self._share_LE + step_L[:, None] * (share_LE - self._share_LE)
        new_L = np.where(suspect_L, self._variance_L, own_L**2)
        self._variance_L = _SPREAD_DECAY * self._variance_L + (1 - _SPREAD_DECAY) * new_L
        self._peak_L = np.maximum(
            _PEAK_DECAY * self._peak_L, np.where(suspect_L, 0.0, np.abs(own_L))
        )


def _corrected_entropy(hits_LE: np.ndarray) -> np.ndarray:
    """[L], with Miller and Madow's correction: n hits on m experts read (m - 1) / 2n too low."""
    experts = hits_LE.shape[1]
    if experts == 1:
        return np.ones(len(hits_LE))
    bias_L = ((hits_LE > 0).sum(1) - 1) / (2 * hits_LE.sum(1))
    corrected_L: np.ndarray = entropy(hits_LE) + bias_L / np.log(experts)
    return corrected_L
