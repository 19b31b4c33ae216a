"""From logits to tokens: adjust, draw, and report log-probabilities.

All rows greedy and plain is one torch call; everything else is paid only by the rows that ask for
it. A row's result depends on its own logits, parameters, seed and position alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.attention.adjustments import adjust
from expertmesh.actors.attention.masks import Masks, forbid
from expertmesh.actors.attention.messages import LOGPROB_FLOOR, TokenLogprobs
from expertmesh.actors.attention.sequence import Sequence

NO_TOKEN = -1


class SamplingKernels(Protocol):
    """The part of kernels.registry.Kernels that sampling needs."""

    @property
    def sample(self) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]: ...

    @property
    def log_probs(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def counter_uniform(self) -> Callable[[int, int], float]: ...


@dataclass(slots=True)
class Sampled:
    """ids: one token per row, NO_TOKEN where the row has no usable logit. logprobs: by row.
    failures: rows whose grammar has failed, with the reason."""

    ids: list[int]
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str] = field(default_factory=dict)


class Sampler:
    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    @torch.inference_mode()
    def sample(
        self, logits_BV: Tensor, sequences: list[Sequence], masks: Masks | None = None
    ) -> Sampled:
        """The next token of each sequence, whose row is the one at its index. Alters the logits.

        masks: of the constrained ones; the last word, whatever bias and penalties say.
        """
        special = [row for row, seq in enumerate(sequences) if seq.special]
        reporting = [row for row in special if sequences[row].params.logprobs is not None]
        raw = self._kernels.log_probs(logits_BV[reporting]) if reporting else None
        if special:
            adjust(logits_BV, special, sequences)
        failures: dict[int, str] = {}
        if masks is not None:
            forbid(logits_BV, masks)
            failures = masks.failures

        ids, best = largest(logits_BV)
        if not math.isfinite(sum(best)):
            ids = [i if math.isfinite(b) else NO_TOKEN for i, b in zip(ids, best, strict=True)]
        drawing = [row for row in special if not sequences[row].greedy and ids[row] != NO_TOKEN]
        if drawing:
            drawn = self._draw(logits_BV, drawing, sequences)
            for row, token in zip(drawing, drawn, strict=True):
                ids[row] = token
        if raw is None:
            return Sampled(ids, {}, failures)
        tokens = [max(ids[row], 0) for row in reporting]
        counts = [sequences[row].params.logprobs or 0 for row in reporting]
        scores = dict(zip(reporting, report(raw, tokens, counts), strict=True))
        return Sampled(ids, scores, failures)

    @torch.inference_mode()
    def score(self, logits_TV: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs] | None:
        """Log-probabilities of given tokens, one per row: those of a prompt. None when a row has
        no finite maximum."""
        if not math.isfinite(sum(largest(logits_TV)[1])):
            return None
        return report(self._kernels.log_probs(logits_TV), tokens, [top] * len(tokens))

    def _draw(self, logits_BV: Tensor, rows: list[int], sequences: list[Sequence]) -> list[int]:
        chosen = [sequences[row] for row in rows]
        params, device = [seq.params for seq in chosen], logits_BV.device

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        uniform = [self._kernels.counter_uniform(seq.seed, len(seq.tokens)) for seq in chosen]
        drawn: list[int] = self._kernels.sample(
            logits_BV if len(rows) == len(logits_BV) else logits_BV[rows],
            column([p.temperature for p in params]),
            torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
            column([p.top_p for p in params]),
            column([p.min_p for p in params]),
            torch.tensor(uniform, dtype=torch.float64, device=device),
        ).tolist()
        return drawn


def largest(logits_BV: Tensor) -> tuple[list[int], list[float]]:
    """Argmax (the lowest of equals) and maximum of each row; NaN counts as the largest.

    NumPy's vectorised argmax takes a tenth of the time of torch's on a CPU.
    """
    if logits_BV.device.type == "cpu":
        rows = logits_BV.numpy()
        ids = rows.argmax(axis=1)
        return ids.tolist(), rows[np.arange(len(ids)), ids].tolist()
    best_B, ids_B = logits_BV.max(dim=-1)
    return ids_B.tolist(), best_B.tolist()


def report(log_probs_TV: Tensor, tokens: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """Each row's log-probability of its token, the token's rank, and the row's best `count`."""
    at_T1 = torch.tensor(tokens, device=log_probs_TV.device).unsqueeze(1)
    own_T1 = log_probs_TV.gather(1, at_T1)
    ranks = ((log_probs_TV > own_T1).sum(dim=1) + 1).tolist()
    own = own_T1.squeeze(1).tolist()
    top = max(counts)
    values, ids = (part.tolist() for part in log_probs_TV.topk(top, dim=1))
    return [
        TokenLogprobs(
            token,
            finite(own[row]),
            ranks[row],
            [(i, finite(v)) for i, v in zip(ids[row][:n], values[row][:n], strict=True)],
        )
        for row, (token, n) in enumerate(zip(tokens, counts, strict=True))
    ]


def finite(value: float) -> float:
    """LOGPROB_FLOOR for anything below it, minus infinity and NaN included."""
    return value if value > LOGPROB_FLOOR else LOGPROB_FLOOR
