"""The sketch of one layer's old pages: always resident, of the whole context (kv-state 3.4)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.kernels.sketch.torch_ops import sketch_encode, sketch_scores, sketch_sum
from expertmesh.kernels.sketch.types import Basis

BLOCK_PAGES = 64  # allocated, and scored, at a time


class Block(NamedTuple):
    """codes uint8 [64 pages * 64, B]; scales float16 [64 pages * 64]; rests bfloat16
    [64 pages, C]: what the sketch leaves of a page's mean row."""

    codes: Tensor
    scales: Tensor
    rests: Tensor


class SketchIndex:
    """T = 64 * pages tokens, in order of position."""

    def __init__(self, basis: Basis) -> None:
        self.basis, self.pages = basis, 0
        self._blocks: list[Block] = []

    @property
    def nbytes(self) -> int:
        return self.basis.nbytes + sum(part.nbytes for block in self._blocks for part in block)

    @property
    def bits(self) -> float:
        """Per value of a row, all told."""
        basis = self.basis
        width = basis.mean_C.shape[0]
        return 8 * (basis.code_bytes + 2) / width + 16 / PAGE_TOKENS

    def add(self, rows_TC: Tensor) -> None:
        """The rows of one more page, [64, C]."""
        at = self.pages % BLOCK_PAGES
        if not at:
            self._blocks.append(self._new_block(rows_TC.device))
        block, tokens = self._blocks[-1], slice(at * PAGE_TOKENS, (at + 1) * PAGE_TOKENS)
        codes, scales = sketch_encode(rows_TC, self.basis)
        block.codes[tokens], block.scales[tokens] = codes, scales
        even = rows_TC.new_full((1, PAGE_TOKENS), 1 / PAGE_TOKENS, dtype=torch.float32)
        estimate = sketch_sum(even, codes, scales, self.basis)[0]
        block.rests[at] = rows_TC.float().mean(dim=0) - estimate
        self.pages += 1

    def scores(self, q_HC: Tensor, scale: float) -> Tensor:
        """Estimated scores of all tokens, float32 [H, T]."""
        parts = [
            sketch_scores(q_HC, codes, scales, self.basis, scale)
            for codes, scales, _ in self._filled()
        ]
        return torch.cat(parts, dim=1)

    def weighted_sum(self, weights_HT: Tensor) -> Tensor:
        """sum_t weight_t * (estimate of row t), float32 [H, C]."""
        total, at = weights_HT.new_zeros(1), 0
        for codes, scales, rests in self._filled():
            part_HT = weights_HT[:, at : at + codes.shape[0]]
            page_HN = part_HT.reshape(len(part_HT), -1, PAGE_TOKENS).sum(dim=2)
            total = total + sketch_sum(part_HT, codes, scales, self.basis)
            total += page_HN @ rests.float()
            at += codes.shape[0]
        return total

    def _filled(self) -> Iterator[Block]:
        left = self.pages
        for block in self._blocks:
            pages = min(left, BLOCK_PAGES)
            tokens = pages * PAGE_TOKENS
            yield Block(block.codes[:tokens], block.scales[:tokens], block.rests[:pages])
            left -= pages

    def _new_block(self, device: torch.device) -> Block:
        tokens, width = BLOCK_PAGES * PAGE_TOKENS, self.basis.mean_C.shape[0]
        return Block(
            torch.empty(tokens, self.basis.code_bytes, dtype=torch.uint8, device=device),
            torch.empty(tokens, dtype=torch.float16, device=device),
            torch.empty(BLOCK_PAGES, width, dtype=torch.bfloat16, device=device),
        )
