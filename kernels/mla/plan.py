"""Which cache rows a decode step reads: worked out once, used by every layer of the step."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from expertmesh.kernels.mla.types import PAGE


@cache
def row_offsets() -> Tensor:
    """int64 [65, 64]: for n valid tokens the offset read at each place of a page.

    Places behind the last token repeat it: what was never written is never read.
    """
    with torch.inference_mode(False):
        valid = torch.arange(PAGE + 1).unsqueeze(1)
        return torch.minimum(torch.arange(PAGE), (valid - 1).clamp(min=0))


@cache
def valid_bias() -> Tensor:
    """float32 [65, 64]: 0 at the first n places, -inf behind them."""
    with torch.inference_mode(False):
        behind = torch.arange(PAGE) >= torch.arange(PAGE + 1).unsqueeze(1)
        return torch.zeros(PAGE + 1, PAGE).masked_fill_(behind, float("-inf"))


def context_rows(pages_N: Tensor, length: int) -> Tensor:
    """Cache rows of a context's pages, in order, int64 [n * 64]: of those that `length` tokens
    reach. Places behind the last token repeat it."""
    pages = (length + PAGE - 1) // PAGE
    rows_NP = (pages_N[:pages] * PAGE).unsqueeze(1) + torch.arange(PAGE, device=pages_N.device)
    used = length - (pages - 1) * PAGE
    rows_NP[-1, used:] = rows_NP[-1, used - 1]
    return rows_NP.flatten()


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """N pages of B rows, the pages of a row adjacent and in order."""

    row_N: Tensor  # int64 [N], the batch row of each page
    rows_NP: Tensor  # int64 [N, 64], cache rows
    bias_N1P: Tensor  # float32 [N, 1, 64], -inf behind the last token
    single: bool  # every row has exactly one page
    padded: bool  # some rows have none


def plan_decode(page_table_BN: Tensor, lengths_B: Tensor) -> DecodePlan:
    """Plan of one step, made on the host. Table entries behind a row's last page are ignored; a row
    of length 0 has no page."""
    pages: list[int] = []
    owners: list[int] = []
    valid: list[int] = []
    lengths = lengths_B.tolist()
    for row, (table, length) in enumerate(zip(page_table_BN.tolist(), lengths, strict=True)):
        if not length:
            continue
        count = (length + PAGE - 1) // PAGE
        pages += table[:count]
        owners += [row] * count
        valid += [PAGE] * (count - 1)
        valid.append(length - PAGE * (count - 1))
    index = torch.tensor([pages, owners, valid], dtype=torch.int64)
    rows_NP = row_offsets().index_select(0, index[2]).add_(index[0].mul_(PAGE).unsqueeze(1))
    bias_N1P = valid_bias().index_select(0, index[2]).unsqueeze(1)
    device, padded = page_table_BN.device, 0 in lengths
    return DecodePlan(
        index[1].to(device),
        rows_NP.to(device),
        bias_N1P.to(device),
        single=len(pages) == len(lengths) and not padded,
        padded=padded,
    )
