"""Presence, frequency and repetition penalties over the distinct tokens of one sequence."""

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.attention.messages import SamplingParams


class TokenCounts:
    """How often each token was generated; tokens of the prompt stand with 0.

    Counts follow the text, not the computation, so a recompute after preemption cannot turn
    generated tokens into prompt tokens or count them twice.
    """

    def __init__(self, params: SamplingParams, seen: list[int]) -> None:
        self._params = params
        distinct = list(dict.fromkeys(seen))
        self._index = {token: i for i, token in enumerate(distinct)}
        size = max(64, 2 * len(distinct))
        self._ids = np.zeros(size, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(size, dtype=np.float32)

    def add(self, token: int) -> None:
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[at] = token
        self._counts[at] += 1

    def apply(self, logits_V: Tensor) -> None:
        """In place. Repetition first, as vLLM: positive logits are divided, others multiplied."""
        used, params = len(self._index), self._params
        if not used:
            return
        ids = torch.from_numpy(self._ids[:used]).to(logits_V.device)
        counts = torch.from_numpy(self._counts[:used]).to(logits_V.device)
        values = logits_V[ids]
        if params.repetition_penalty != 1.0:
            r = params.repetition_penalty
            values = torch.where(values > 0, values / r, values * r)
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        logits_V[ids] = values


def counts_for(params: SamplingParams, prompt: list[int]) -> TokenCounts | None:
    """None when no penalty is asked for. The prompt only matters to the repetition penalty."""
    repetition = params.repetition_penalty != 1.0
    if not (repetition or params.presence_penalty or params.frequency_penalty):
        return None
    return TokenCounts(params, prompt if repetition else [])
