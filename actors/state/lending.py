"""Snapshots in pages that nobody else needs: one budget of device memory for both (kv-state 3.2).

Kernels write a snapshot to a place of its own, of which there are few. One that would have to go
from there lies in pages of the latent cache until those are of more use to somebody else.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.state.model_state import ModelState


class Lending:
    """How the bytes lie there: each MLA layer's part of the pages holds so many KDA layers, one
    after the other, so that nothing larger than one such part is held twice on the way.

    pages: that one snapshot takes.
    """

    def __init__(self, state: ModelState) -> None:
        """Raises ValueError for a model without MLA layers, which has no pages."""
        mla, kda = state.latents.shape[0], state.kda.shape[0]
        if not mla:
            raise ValueError("a model without MLA layers has no pages to lend")
        self._state, self._each = state, -(-kda // mla)
        layer_bytes = (state.saved_kda.nbytes + state.saved_conv.nbytes) // max(
            1, kda * state.snapshots
        )
        self.pages = -(-self._each * layer_bytes // (state.page_bytes // mla))

    def write(self, snapshot: int, pages: Sequence[int]) -> None:
        """From a snapshot's place to pages."""
        state = self._state
        for part in self._parts(pages):
            kda, conv = (
                state.saved_kda[part.layers, snapshot],
                state.saved_conv[part.layers, snapshot],
            )
            rows = part.rows.new_zeros(len(pages), part.rows[0].numel())
            flat = rows.view(-1)
            flat[: kda.nbytes] = _bytes(kda)
            flat[kda.nbytes : kda.nbytes + conv.nbytes] = _bytes(conv)
            part.rows[part.pages] = rows.view(len(pages), *part.rows.shape[1:])

    def read(self, pages: Sequence[int], kda: Tensor, conv: Tensor) -> None:
        """From there to kda [kda layers, H, Dk, Dv] and conv [kda layers, W - 1, 3 * H * D]."""
        for part in self._parts(pages):
            flat = part.rows[part.pages].view(-1)
            for out in (kda[part.layers], conv[part.layers]):
                size = out.nbytes
                out.copy_(flat[:size].view(out.dtype).view(out.shape))
                flat = flat[size:]

    def _parts(self, pages: Sequence[int]) -> Iterator["_Part"]:
        paged = self._state.paged()
        numbers = torch.tensor(pages, dtype=torch.int64, device=paged.device)
        for layer, rows in enumerate(paged):
            begin = layer * self._each
            layers = slice(begin, min(begin + self._each, self._state.kda.shape[0]))
            if layers.start < layers.stop:
                yield _Part(rows.view(torch.uint8), numbers, layers)


class _Part(NamedTuple):
    """One MLA layer's rows as bytes [all pages, 64, bytes of a row], the pages that are lent, and
    which KDA layers lie in them."""

    rows: Tensor
    pages: Tensor
    layers: slice


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)
