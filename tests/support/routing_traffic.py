"""Synthetic routing: sequences of several domains, each with favourite experts, whose mix drifts.

W windows, D domains, L layers, E experts, K experts per token.
"""

from dataclasses import dataclass

import numpy as np

# A sequence stays in its domain for so many tokens of a window: what makes small windows lumpy.
SEQUENCE_TOKENS = 150


@dataclass(frozen=True)
class Traffic:
    """shares_DLE: each domain's, rows sum to 1. mix_WD: share of each domain. tokens_W: load."""

    shares_DLE: np.ndarray
    mix_WD: np.ndarray
    tokens_W: np.ndarray
    top_k: int
    seed: int

    @property
    def layers(self) -> int:
        return self.shares_DLE.shape[1]

    @property
    def experts(self) -> int:
        return self.shares_DLE.shape[2]

    def shares(self, window: int) -> np.ndarray:
        """[L, E] of this window: its sequences draw domains and have tastes of their own."""
        rng = np.random.default_rng((self.seed, window))
        sequences = max(1, int(self.tokens_W[window]) // SEQUENCE_TOKENS)
        domains_D = rng.multinomial(sequences, self.mix_WD[window]) / sequences
        shares_LE = np.einsum("d,dle->le", domains_D, self.shares_DLE)
        taste_LE = rng.normal(0, 0.8 / np.sqrt(sequences), shares_LE.shape)
        shares_LE = shares_LE * np.exp(taste_LE)
        return shares_LE / shares_LE.sum(1, keepdims=True)

    def hits(self, window: int, shares_LE: np.ndarray | None = None) -> np.ndarray:
        """int64 [L, E], drawn from the window's shares or from others."""
        rng = np.random.default_rng((self.seed, window, 1))
        shares_LE = self.shares(window) if shares_LE is None else shares_LE
        return rng.multinomial(int(self.tokens_W[window]) * self.top_k, shares_LE)


def drifting(
    windows: int,
    *,
    layers: int = 4,
    experts: int = 32,
    top_k: int = 4,
    domains: int = 6,
    tokens: float = 2000,
    sigma: float = 0.7,
    seed: int = 0,
) -> Traffic:
    """Domains come and go slowly, and at times the whole mix changes from one window to the next.

    tokens: usual load of a window. The load walks between a hundredth and a few times of that,
    with bursts of ten times, quiet spells of a few tokens, and idle windows.
    """
    rng = np.random.default_rng(seed)
    common_LE = rng.normal(0, 0.4, (layers, experts))
    logits_DLE = common_LE + rng.normal(0, sigma, (domains, layers, experts))
    shares_DLE = np.exp(logits_DLE)
    shares_DLE /= shares_DLE.sum(2, keepdims=True)
    mix_WD = np.empty((windows, domains))
    logit_D = rng.normal(0, 1.5, domains)
    for window in range(windows):
        logit_D = 0.995 * logit_D + rng.normal(0, 0.12, domains)
        if rng.random() < 1 / 250:
            logit_D = rng.normal(0, 2.5, domains)
        mix_WD[window] = np.exp(logit_D) / np.exp(logit_D).sum()
    walk = np.empty(windows)
    level = 0.0
    for window in range(windows):
        level = 0.99 * level + rng.normal(0, 0.15)
        walk[window] = level
    tokens_W = tokens * np.exp(np.clip(walk, -4.6, 1.5))
    kind = rng.random(windows)
    tokens_W[kind < 0.02] *= 10
    tokens_W[kind > 0.95] = 0
    quiet = np.flatnonzero(rng.random(windows) < 1 / 300)
    for begin in quiet:
        tokens_W[begin : begin + rng.integers(5, 60)] = rng.integers(0, 40)
    return Traffic(shares_DLE, mix_WD, tokens_W.astype(np.int64), top_k, seed)
