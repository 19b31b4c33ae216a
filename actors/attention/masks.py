"""Which tokens constrained rows may take: computed beside the forward pass, applied after it.

A mask depends on the tokens before it only, so a thread computes it while the model runs. What
cannot be computed concerns its own row.
"""

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertmesh.actors.constraint.matcher import Words, words_for
from expertmesh.actors.constraint.spec import ConstraintError

if TYPE_CHECKING:
    from expertmesh.actors.attention.sequence import Sequence

_BITS = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
# A mask with fewer words that are not zero is cheaper to apply by the ids it allows.
_SPARSE = 1 / 16


@dataclass(slots=True)
class Masks:
    """words: [R, ceil(V / 32)], a bit per token that rows[i] may take. failures: row -> reason."""

    rows: list[int]
    words: Words
    failures: dict[int, str] = field(default_factory=dict)


class MaskMaker:
    def __init__(self, vocab_size: int) -> None:
        self._words = words_for(vocab_size)
        self._thread = ThreadPoolExecutor(1, "masks")

    def start(self, sampled: Rows["Sequence"]) -> "Future[Masks] | None":
        """The masks of the next token of those that have a matcher; None when none has."""
        rows = [row for row, seq in enumerate(sampled) if seq.matcher is not None]
        if not rows:
            return None
        masks = Masks(rows, np.zeros((len(rows), self._words), dtype=np.int32))
        return self._thread.submit(_fill, masks, [sampled[row] for row in rows])


def _fill(masks: Masks, sequences: list["Sequence"]) -> Masks:
    for at, (row, seq) in enumerate(zip(masks.rows, sequences, strict=True)):
        assert seq.matcher is not None
        try:
            seq.matcher.fill(masks.words[at], seq.unwanted_ends())
        except ConstraintError as error:
            masks.failures[row] = str(error)
    return masks


def forbid(logits_BV: Tensor, masks: Masks) -> None:
    """Minus infinity, in place, for every token that a mask does not allow."""
    good = [at for at, row in enumerate(masks.rows) if row not in masks.failures]
    if logits_BV.device.type == "cpu":
        for at in good:
            _forbid_row(logits_BV[masks.rows[at]].numpy(), masks.words[at])
    elif good:
        device, vocab = logits_BV.device, logits_BV.shape[1]
        words_RW = torch.from_numpy(masks.words[good]).to(device)
        shifts_32 = torch.arange(32, dtype=torch.int32, device=device)
        allowed_RV = ((words_RW.unsqueeze(-1) >> shifts_32) & 1).flatten(1)[:, :vocab].bool()
        rows_R = torch.tensor([masks.rows[at] for at in good], device=device)
        logits_BV[rows_R] = logits_BV[rows_R].masked_fill(~allowed_RV, -torch.inf)


def _forbid_row(logits_V: NDArray[np.float32], words_W: Words) -> None:
    """Whole words at a time where they are 0 or full: most of a mask is one or the other."""
    some = np.flatnonzero(words_W)
    if len(some) < len(words_W) * _SPARSE:
        word, bit = np.nonzero(words_W[some, None] & _BITS)
        ids = some[word] * 32 + bit
        kept = logits_V[ids]
        logits_V.fill(-np.inf)
        logits_V[ids] = kept
        return
    whole = len(logits_V) // 32
    blocks, words = logits_V[: whole * 32].reshape(whole, 32), words_W[:whole]
    blocks[words == 0] = -np.inf
    mixed = np.flatnonzero((words != 0) & (words != -1))
    part = blocks[mixed]
    part[(words[mixed, None] & _BITS) == 0] = -np.inf
    blocks[mixed] = part
    rest = logits_V[whole * 32 :]
    rest[(words_W[whole:, None] & _BITS)[:, : len(rest)].ravel() == 0] = -np.inf
