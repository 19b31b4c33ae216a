"""Old rows in 8 or 4 bits, in host memory, with a bound on each one's error (kv-state 3.4)."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.codec import quantized

GROUP_PAGES = 64  # decoded at a time


class Scored(NamedTuple):
    """Of T tokens. scores_HT: estimates. slack_HT: how far the exact score may be from them."""

    scores_HT: Tensor
    slack_HT: Tensor


class BaseRows:
    """One layer's pages in order. Every step that asks decodes all of them."""

    def __init__(self, bits: int, width: int, device: torch.device) -> None:
        self.bits, self.pages = float(bits), 0
        self.nbytes = 0  # in host memory
        self._width, self._device = width, device
        self._blobs: list[bytes] = []

    @staticmethod
    def page_bytes(bits: int, width: int) -> int:
        """What one page of rows [64, width] adds."""
        return len(quantized.encode_base(torch.zeros(PAGE_TOKENS, width), bits)[0])

    def add(self, rows_TC: Tensor) -> None:
        """The rows of one more page, [64, C]."""
        base, _ = quantized.encode_base(rows_TC.cpu(), int(self.bits))
        self._blobs.append(base)
        self.pages += 1
        self.nbytes += len(base)

    def score(self, q_HC: Tensor, scale: float) -> Scored:
        """|s - scale q . estimate| <= scale |q| |row - estimate| (kv-state 3.3 e)."""
        length_H1 = q_HC.norm(dim=1, keepdim=True) * scale
        scores, slacks = [], []
        for rows_TC, errors_T in self.groups():
            scores.append(q_HC @ rows_TC.t() * scale)
            slacks.append(length_H1 * errors_T)
        return Scored(torch.cat(scores, dim=1), torch.cat(slacks, dim=1))

    def weighted_sum(self, weights_HT: Tensor) -> Tensor:
        """sum_t weight_t * (estimate of row t), float32 [H, C]."""
        total, at = weights_HT.new_zeros(weights_HT.shape[0], self._width), 0
        for rows_TC, _ in self.groups():
            total += weights_HT[:, at : at + len(rows_TC)] @ rows_TC
            at += len(rows_TC)
        return total

    def spread(self, out_HR: Tensor) -> tuple[Tensor, Tensor]:
        """How far each token's estimated value may be from a head's output, |v - out| [H, T], and
        the bounds on the errors of the rows [T]."""
        distances, errors = [], []
        for rows_TC, errors_T in self.groups():
            values_TR = rows_TC[:, : out_HR.shape[1]]
            near_HT = torch.cdist(out_HR, values_TR)
            # A difference of large squares: short by so much at most.
            short_HT = out_HR.norm(dim=1, keepdim=True) + values_TR.norm(dim=1)
            distances.append(near_HT + 2e-3 * short_HT)
            errors.append(errors_T)
        return torch.cat(distances, dim=1), torch.cat(errors)

    def groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(estimates float32 [T, C], error bounds float32 [T]) of some pages at a time."""
        for i in range(0, self.pages, GROUP_PAGES):
            opened = [
                quantized.open_base(memoryview(blob), PAGE_TOKENS, self._width, int(self.bits))
                for blob in self._blobs[i : i + GROUP_PAGES]
            ]
            base = quantized.Base(*(torch.cat(parts) for parts in zip(*opened, strict=True)))
            rows = quantized.decode(base, self._device)
            yield rows, base.errors.to(self._device).float()
