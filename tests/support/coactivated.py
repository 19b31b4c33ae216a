"""Synthetic routing in which experts are picked together, and a measure of its skew.

A token's choices are the K largest of: the expert's popularity, plus a bonus when the expert
belongs to the token's topic, a smaller one when it belongs to the topic's domain, plus Gumbel
noise. Topics last for a piece of a sequence; some tokens (function words) have none. Which experts
belong together is drawn at random, so neighbours by number are strangers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK = 4096


@dataclass(frozen=True)
class Traffic:
    """sigma: of the log popularity; 0.45 alone gives a Gini of 0.25, the low end of what is found
    on text (DODOCO, arXiv 2605.20982: 0.24 to 0.38). topic, domain: bonuses in log units."""

    experts: int = 896
    top_k: int = 16
    topics: int = 64
    domains: int = 16
    sigma: float = 0.45
    topic: float = 3.0
    domain: float = 1.5
    no_topic: float = 0.2
    piece: int = 4
    seed: int = 0

    def tokens(self, count: int) -> NDArray[np.int16]:
        """int16 [count, K]. The same seed and count give the same tokens."""
        rng = np.random.default_rng(self.seed)
        popularity_E = rng.normal(0.0, self.sigma, self.experts)
        topic_E = rng.permutation(self.experts) % self.topics
        same_topic_ZE = np.arange(self.topics)[:, None] == topic_E
        same_domain_ZE = (np.arange(self.topics) % self.domains)[:, None] == topic_E % self.domains
        logit_ZE = popularity_E + self.topic * same_topic_ZE + self.domain * same_domain_ZE
        logit_ZE = np.vstack([logit_ZE, popularity_E]).astype(np.float32)
        weight_Z = rng.dirichlet(np.full(self.topics, 5.0))
        topic_N = np.repeat(
            rng.choice(self.topics, -(-count // self.piece), p=weight_Z), self.piece
        )[:count]
        topic_N[rng.random(count) < self.no_topic] = self.topics
        chosen = np.empty((count, self.top_k), np.int16)
        for begin in range(0, count, CHUNK):
            part = topic_N[begin : begin + CHUNK]
            uniform = rng.random((len(part), self.experts), np.float32)
            score = logit_ZE[part] - np.log(-np.log(uniform + 1e-12) + 1e-12)
            best = np.argpartition(-score, self.top_k - 1, axis=1)[:, : self.top_k]
            chosen[begin : begin + CHUNK] = np.sort(best, axis=1)
        return chosen


def hits(ids_NK: NDArray[np.integer], experts: int) -> NDArray[np.int64]:
    """int64 [E]: how often each expert was chosen."""
    return np.bincount(ids_NK.ravel(), minlength=experts)


def gini(hits_E: NDArray[np.integer]) -> float:
    """0: all alike; towards 1: one has everything."""
    ordered = np.sort(hits_E).astype(np.float64)
    rank = 2 * np.arange(1, len(ordered) + 1) - len(ordered) - 1
    return float(rank @ ordered / (len(ordered) * ordered.sum()))
