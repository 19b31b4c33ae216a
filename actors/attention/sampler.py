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
from expertmesh.actors.model.upload import Uploads, uploads_for

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
    """On a GPU a step's tokens are read back once, and what the rows ask for travels once."""

    def __init__(
        self,
        kernels: SamplingKernels,
        device: torch.device | str = "cpu",
        uploads: Uploads | None = None,
    ) -> None:
        """device: of the logits. uploads: how numbers get there; by default what it takes."""
        self._kernels, device = kernels, torch.device(device)
        self._uploads = uploads or uploads_for(device)
        self._pick = self._pick_here if device.type == "cpu" else self._pick_there

    @torch.inference_mode()
    def sample(
        self, logits_BV: Tensor, sequences: list[Sequence], masks: Masks | None = None
    ) -> Sampled:
        """The next token of each sequence, whose row is the one at its index. Alters the logits.

        masks: of the constrained ones; the last word, whatever bias and penalties say.
        """
        special = [row for row, seq in enumerate(sequences) if seq.special]
        reporting = [row for row in special if sequences[row].params.logprobs is not None]
        raw = self._kernels.log_probs(self.rows(logits_BV, reporting)) if reporting else None
        if special:
            adjust(logits_BV, special, sequences, self._uploads)
        failures: dict[int, str] = {}
        if masks is not None:
            forbid(logits_BV, masks, self._uploads)
            failures = masks.failures

        drawing = [row for row in special if not sequences[row].greedy]
        ids = self._pick(logits_BV, drawing, sequences)
        if raw is None:
            return Sampled(ids, {}, failures)
        tokens = [max(ids[row], 0) for row in reporting]
        counts = [sequences[row].params.logprobs or 0 for row in reporting]
        scores = dict(zip(reporting, report(raw, tokens, counts, self._uploads), strict=True))
        return Sampled(ids, scores, failures)

    def _pick_here(
        self, logits_BV: Tensor, drawing: list[int], sequences: list[Sequence]
    ) -> list[int]:
        """Looking at the largest first saves drawing from rows that have none."""
        ids, best = largest(logits_BV)
        if not math.isfinite(sum(best)):
            ids = [i if math.isfinite(b) else NO_TOKEN for i, b in zip(ids, best, strict=True)]
        drawing = [row for row in drawing if ids[row] != NO_TOKEN]
        if drawing:
            drawn = self._draw(logits_BV, drawing, sequences).tolist()
            for row, token in zip(drawing, drawn, strict=True):
                ids[row] = token
        return ids

    def _pick_there(
        self, logits_BV: Tensor, drawing: list[int], sequences: list[Sequence]
    ) -> list[int]:
        ids, best = self._picked(logits_BV, drawing, sequences).tolist()
        return [int(i) if math.isfinite(b) else NO_TOKEN for i, b in zip(ids, best, strict=True)]

    def _picked(self, logits_BV: Tensor, drawing: list[int], sequences: list[Sequence]) -> Tensor:
        """Ids and largest logits, float64 [2, B]: nothing is asked of the device on the way."""
        best_B, ids_B = logits_BV.max(dim=-1)
        if drawing:
            drawn_R = self._draw(logits_BV, drawing, sequences)
            (rows_R,) = self._uploads.send(np.array(drawing))
            ids_B = ids_B.index_copy(0, rows_R, drawn_R)
        return torch.stack([ids_B.double(), best_B.double()])

    def rows(self, logits_BV: Tensor, rows: list[int]) -> Tensor:
        """Those rows, distinct ones in ascending order."""
        if len(rows) == len(logits_BV):
            return logits_BV
        (rows_R,) = self._uploads.send(np.array(rows))
        return logits_BV.index_select(0, rows_R)

    @torch.inference_mode()
    def score(self, logits_TV: Tensor, tokens: list[int], top: int) -> list[TokenLogprobs] | None:
        """Log-probabilities of given tokens, one per row: those of a prompt. None when a row has
        no finite maximum."""
        if not bool(logits_TV.amax(dim=-1).isfinite().all()):
            return None
        log_probs_TV = self._kernels.log_probs(logits_TV)
        return report(log_probs_TV, tokens, [top] * len(tokens), self._uploads)

    def _draw(self, logits_BV: Tensor, rows: list[int], sequences: list[Sequence]) -> Tensor:
        chosen = [sequences[row] for row in rows]
        params = [seq.params for seq in chosen]
        uniform = [self._kernels.counter_uniform(seq.seed, len(seq.tokens)) for seq in chosen]
        columns = self._uploads.send(
            np.array([p.temperature for p in params], np.float32),
            np.array([p.top_k for p in params]),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
            np.array(uniform, np.float64),
        )
        return self._kernels.sample(self.rows(logits_BV, rows), *columns)


def largest(logits_BV: Tensor) -> tuple[list[int], list[float]]:
    """Argmax (the lowest of equals) and maximum of each row; NaN counts as the largest.

    For logits in the host's memory: NumPy's vectorised argmax takes a tenth of the time of torch's.
    """
    rows = logits_BV.numpy()
    ids = rows.argmax(axis=1)
    return ids.tolist(), rows[np.arange(len(ids)), ids].tolist()


def report(
    log_probs_TV: Tensor, tokens: list[int], counts: list[int], uploads: Uploads
) -> list[TokenLogprobs]:
    """Each row's log-probability of its token, the token's rank, and the row's best `count`."""
    top = max(counts)
    (tokens_T,) = uploads.send(np.array(tokens))
    own_T1 = log_probs_TV.gather(1, tokens_T.unsqueeze(1))
    ranks_T1 = (log_probs_TV > own_T1).sum(dim=1, keepdim=True) + 1
    # Read at once; every part is exact in float64.
    parts = (own_T1, ranks_T1, *log_probs_TV.topk(top, dim=1))
    table = torch.cat([part.double() for part in parts], dim=1).tolist()
    return [
        TokenLogprobs(
            token,
            finite(own),
            int(rank),
            [(int(i), finite(v)) for i, v in zip(best[top : top + n], best[:n], strict=True)],
        )
        for token, n, (own, rank, *best) in zip(tokens, counts, table, strict=True)
    ]


def finite(value: float) -> float:
    """LOGPROB_FLOOR for anything below it, minus infinity and NaN included."""
    return value if value > LOGPROB_FLOOR else LOGPROB_FLOOR
