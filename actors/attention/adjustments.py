"""What changes logits before a draw: bias, penalties, and end ids that may not come yet.

All rows of a step are adjusted by the same few tensor operations, on flat indices row * V + id.
"""

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.actors.attention.messages import SamplingParams
from expertmesh.actors.model.upload import Uploads

if TYPE_CHECKING:
    from expertmesh.actors.attention.sequence import Sequence

Ids = NDArray[np.int64]
Values = NDArray[np.float32]


class Penalties:
    """The distinct tokens of one sequence, and what each of them is worth less.

    Presence and frequency see generated tokens, repetition those of the prompt as well. Counts
    follow the text, not the computation, so a recompute after preemption can neither turn
    generated tokens into prompt tokens nor count them twice.
    """

    def __init__(self, params: SamplingParams, prompt: list[int]) -> None:
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._repetition = params.repetition_penalty
        distinct = list(dict.fromkeys(prompt)) if self._repetition != 1.0 else []
        self._index = {token: at for at, token in enumerate(distinct)}
        self._counts = dict.fromkeys(distinct, 0)
        size = max(64, 2 * len(distinct))
        self._ids: Ids = np.zeros(size, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._minus: Values = np.zeros(size, dtype=np.float32)

    def add(self, token: int) -> None:
        """One more generated token."""
        at = self._index.setdefault(token, len(self._index))
        if at == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._minus = np.concatenate([self._minus, np.zeros_like(self._minus)])
        count = self._counts[token] = self._counts.get(token, 0) + 1
        self._ids[at] = token
        self._minus[at] = self._presence + self._frequency * count

    def terms(self) -> tuple[Ids, Values, Values]:
        """(ids, repetition penalty, what to subtract after it), one entry per distinct token."""
        used = len(self._index)
        return (
            self._ids[:used],
            np.full(used, self._repetition, dtype=np.float32),
            self._minus[:used],
        )


def penalties_for(params: SamplingParams, prompt: list[int]) -> Penalties | None:
    """None when no penalty is asked for."""
    if params.repetition_penalty == 1.0 and not (
        params.presence_penalty or params.frequency_penalty
    ):
        return None
    return Penalties(params, prompt)


def adjust(
    logits_BV: Tensor, rows: Rows[int], sequences: Rows["Sequence"], uploads: Uploads
) -> None:
    """In place, the given rows only; row i belongs to sequences[i]. Bias first, then penalties as
    in vLLM (positive logits are divided by the repetition penalty, others multiplied), then the
    mask, so that no bias lifts an end id that min_tokens forbids. A constrained sequence's mask,
    which comes after all this, does that as well."""
    flat, vocab = logits_BV.view(-1), logits_BV.shape[1]
    bias: dict[int, float] = {}
    penalised: list[tuple[Ids, Values, Values]] = []
    masked: list[int] = []
    for row in rows:
        seq, base = sequences[row], row * vocab
        if seq.params.logit_bias:
            bias.update((base + i, b) for i, b in seq.params.logit_bias.items())
        if seq.penalties is not None:
            ids, times, minus = seq.penalties.terms()
            penalised.append((ids + base, times, minus))
        if len(seq.tokens) < seq.masked_until and seq.matcher is None:
            masked += [base + i for i in seq.end_ids]
    if bias:
        at, plus_N = uploads.send(np.array([*bias]), np.array([*bias.values()], np.float32))
        flat[at] += plus_N
    if penalised:
        joined = (np.concatenate(part) for part in zip(*penalised, strict=True))
        at, times_N, minus_N = uploads.send(*joined)
        values = flat[at]
        flat[at] = torch.where(values > 0, values / times_N, values * times_N) - minus_N
    if masked:
        (at,) = uploads.send(np.array(masked))
        flat[at] = -torch.inf
