"""Experts that were alive and get no hits any more. L MoE layers, E experts.

Statement tested, for each expert: "since its last hit, it should have had mu hits; that it had
none is chance". Traffic drifts, so a count is not Poisson: its mean is mu * exp(sigma * z) with z
normal, where sigma is how far shares have moved of late: this expert's own, and in this window
all experts'. The chance of no hit is then E[exp(-mu * exp(sigma * z))]; Laplace's method gives
-log of it as

    evidence = w * (2 + w) / (2 * sigma**2),   w = W(mu * sigma**2), Lambert's function,

which is mu for sigma -> 0 and grows like log(mu)**2 otherwise: a share that fell for a whole
domain's absence is one event, however many tokens show it. An alarm needs evidence of
log(L * E * 10^5): with so many experts tested in every window, chance alone raises one false alarm
in 10^5 windows. The run of windows without a hit counts as one draw (one z), so that neither slow
nor lasting drift adds evidence window by window. An expert of average share in a K3 layer is found
as soon as some hundred of its hits are missing.
"""

import numpy as np

# log of the windows per false alarm that chance alone may raise.
_LOG_WINDOWS = np.log(1e5)
# Shares move at least so much between windows (as log), whatever little has been seen of them.
LEAST_SIGMA = 0.15
# An expert's own deviations fade with this half-life in windows; fresh ones start wary.
_SPREAD_DECAY = 0.5 ** (1 / 64)
_FIRST_SPREAD = 0.25
# No verdict before the shares are known from so many windows.
WARM_WINDOWS = 8


def lambert_w(x: np.ndarray) -> np.ndarray:
    """The principal branch for x >= 0 to 1e-9, by Halley's iteration."""
    log = np.log1p(x)
    w: np.ndarray = log * (1 - np.log1p(log) / (2 + log))
    for _ in range(3):
        e = np.exp(w)
        f = w * e - x
        w = w - f / (e * (w + 1) - (w + 2) * f / (2 * w + 2))
    return w


class DeadExperts:
    """Tests windows of hits one after the other."""

    def __init__(self, layers: int, experts: int, half_life: float = 8.0) -> None:
        """half_life: of the shares, in windows of usual load."""
        self.dead_LE = np.zeros((layers, experts), bool)
        self._decay = 0.5 ** (1 / half_life)
        self._needed = _LOG_WINDOWS + np.log(layers * experts)
        self._share_LE = np.zeros((layers, experts))
        self._spread_LE = np.full((layers, experts), _FIRST_SPREAD)
        self._windows = 0
        # Since an expert's last hit: hits of its layer, expected hits of its own, and how much of
        # its old share the missed updates would have left.
        self._run_hits_LE = np.zeros((layers, experts))
        self._run_expected_LE = np.zeros((layers, experts))
        self._run_keep_LE = np.ones((layers, experts))

    def observe(self, hits_LE: np.ndarray, age: float) -> np.ndarray:
        """bool [L, E]: experts that have died by this window's evidence, each told once.

        age: weight of the window against a usual one, 0 to 1. Every layer must have hits.
        """
        total_L1 = hits_LE.sum(1, keepdims=True)
        none_LE = hits_LE == 0
        expected_LE = self._share_LE * total_L1
        self._run_hits_LE += total_L1
        self._run_expected_LE += expected_LE
        self._windows += 1
        moved = self._learn_spread(hits_LE, expected_LE, none_LE)
        fresh_LE: np.ndarray = np.zeros_like(none_LE)
        if self._windows > WARM_WINDOWS:
            # Only where there can be enough: evidence never exceeds the expected hits.
            could = none_LE & ~self.dead_LE & (self._run_expected_LE >= self._needed)
            rows, columns = np.nonzero(could)
            if len(rows):
                mu = self._run_expected_LE[rows, columns]
                variance = self._spread_LE[rows, columns] + moved + LEAST_SIGMA**2
                w = lambert_w(mu * variance)
                dying = w * (2 + w) / (2 * variance) >= self._needed
                fresh_LE[rows[dying], columns[dying]] = True
        self._learn_shares(hits_LE, none_LE, age)
        self.dead_LE = (self.dead_LE | fresh_LE) & none_LE
        return fresh_LE

    def expected(self, layer: int, expert: int) -> float:
        """Hits that the expert should have had since its last one."""
        return float(self._run_expected_LE[layer, expert])

    def _learn_spread(
        self, hits_LE: np.ndarray, expected_LE: np.ndarray, none_LE: np.ndarray
    ) -> float:
        """Learns how far shares have moved; returns how far they did in this window, everywhere.

        As the variance of log(hits / expected), of those experts whose hits are many enough to
        tell. Experts without a hit count for the common movement only: when half of all experts
        of the model have none, it is the traffic that has changed.
        """
        known_LE = expected_LE >= 4
        if not known_LE.any():
            return 0.0
        off_LE = np.log((hits_LE + 0.5) / (expected_LE + 0.5))
        noise_LE = 1 / (expected_LE + 0.5)
        square = (1.4826 * np.median(np.abs(off_LE[known_LE]))) ** 2
        moved = max(0.0, float(square - np.median(noise_LE[known_LE])))
        excess_LE = np.maximum(off_LE**2 - noise_LE, 0.0)
        tell_LE = known_LE & ~none_LE
        faded_LE = _SPREAD_DECAY * self._spread_LE
        self._spread_LE = np.where(
            tell_LE, np.maximum(faded_LE + (1 - _SPREAD_DECAY) * excess_LE, excess_LE / 9),
            self._spread_LE,
        )  # fmt: skip
        return moved

    def _learn_shares(self, hits_LE: np.ndarray, none_LE: np.ndarray, age: float) -> None:
        """Shares follow the hits. An expert without a hit keeps its share until the next one,
        which then stands for the whole time since the last: a dead one stays expected, a rare one
        is not overrated."""
        # At first an average of what there is, then a decayed one.
        keep = max(self._decay**age, 0.0) if self._windows > WARM_WINDOWS else (
            (self._windows - 1) / self._windows
        )  # fmt: skip
        self._run_keep_LE *= keep
        hit_LE = ~none_LE
        keep_LE = self._run_keep_LE
        seen_LE = hits_LE / np.maximum(self._run_hits_LE, 1)
        self._share_LE = np.where(
            hit_LE, keep_LE * self._share_LE + (1 - keep_LE) * seen_LE, self._share_LE
        )
        self._run_hits_LE[hit_LE] = 0
        self._run_expected_LE[hit_LE] = 0
        self._run_keep_LE[hit_LE] = 1
