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
from expertmesh.actors.model.upload import Uploads

if TYPE_CHECKING:
    from expertmesh.actors.attention.sequence import Sequence

# By the byte of a mask: what to add to its eight logits.
_BIAS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)


@dataclass(slots=True)
class Masks:
    """words: [R, ceil(V / 32)], a bit per token that rows[i] may take. bias: [R, V], 0 or minus
    infinity, where the logits are in this memory. failures: row -> reason."""

    rows: list[int]
    words: Words
    bias: NDArray[np.float32] | None
    failures: dict[int, str] = field(default_factory=dict)


class MaskMaker:
    """The masks of one step at a time: they share their memory with those of the next."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab, self._words = vocab_size, words_for(vocab_size)
        self._here = device.type == "cpu"
        self._space = np.empty((0, self._words * 32), dtype=np.float32)
        self._thread = ThreadPoolExecutor(1, "masks")

    def start(self, sampled: Rows["Sequence"]) -> "Future[Masks] | None":
        """The masks of the next token of those that have a matcher; None when none has."""
        rows = [row for row, seq in enumerate(sampled) if seq.matcher is not None]
        if not rows:
            return None
        masks = Masks(rows, np.zeros((len(rows), self._words), dtype=np.int32), None)
        return self._thread.submit(self._fill, masks, [sampled[row] for row in rows])

    def _fill(self, masks: Masks, sequences: list["Sequence"]) -> Masks:
        for at, (row, seq) in enumerate(zip(masks.rows, sequences, strict=True)):
            assert seq.matcher is not None
            try:
                seq.matcher.fill(masks.words[at], seq.unwanted_ends())
            except ConstraintError as error:
                masks.failures[row] = str(error)
        if self._here:
            count = len(masks.rows)
            if len(self._space) < count:
                self._space = np.empty((count, self._words * 32), dtype=np.float32)
            expand(masks.words, self._space[:count])
            masks.bias = self._space[:count, : self._vocab]
        return masks


def expand(words_RW: Words, bias_RV: NDArray[np.float32]) -> None:
    """Into bias [R, 32 W]: 0 where a bit is set, else minus infinity."""
    octets = words_RW.view(np.uint8).reshape(-1)
    np.take(_BIAS, octets, axis=0, out=bias_RV.reshape(-1, 8), mode="clip")


def forbid(logits_BV: Tensor, masks: Masks, uploads: Uploads) -> None:
    """Minus infinity, in place, for every token that a mask does not allow."""
    good = [at for at, row in enumerate(masks.rows) if row not in masks.failures]
    if masks.bias is not None:
        for at in good:
            logits_V = logits_BV[masks.rows[at]].numpy()
            np.add(logits_V, masks.bias[at], out=logits_V)
    elif good:
        vocab = logits_BV.shape[1]
        rows = np.array([masks.rows[at] for at in good])
        words_RW, rows_R = uploads.send(masks.words[good], rows)
        shifts_32 = torch.arange(32, dtype=torch.int32, device=logits_BV.device)
        allowed_RV = ((words_RW.unsqueeze(-1) >> shifts_32) & 1).flatten(1)[:, :vocab].bool()
        logits_BV[rows_R] = logits_BV[rows_R].masked_fill(~allowed_RV, -torch.inf)
