"""How far attention over estimates can be from exact attention, proven (kv-state 3.3, refine form).

Letters: H heads, T tokens that are estimated, N their pages.
"""

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS

# Sums of float32 are not exact either: what is claimed is a little more than what is computed.
ROUNDING = 1e-5


def terms(
    weights_HT: Tensor, slack_HT: Tensor, distance_HT: Tensor, errors_T: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token may add to the error of a head's output, and to the share by which that error
    feeds on itself; both [H, T].

    weights_HT: p, of the softmax that used the estimates. slack_HT: of the scores. distance_HT: of
    an estimated value from the output that was computed. errors_T: of the values.

    With w = exp(score), a dash for what is estimated and Z' = sum w', it holds that
    o' - o = 1/Z' sum [(w' - w)(v - o) + w' (v' - v)], |w' - w| <= w' (exp(slack) - 1) and
    |v - o| <= |v' - o'| + |v' - v| + |o' - o|. Hence
    |o' - o| <= sum p (exp(slack) - 1)(distance + error + |o' - o|) + p error.
    """
    growth_HT = weights_HT * torch.expm1(slack_HT)
    return growth_HT * (distance_HT + errors_T) + weights_HT * errors_T, growth_HT


def bound(term_HT: Tensor, growth_HT: Tensor, out_HR: Tensor) -> Tensor:
    """Largest |o' - o| of each head [H]; infinity where nothing is proven."""
    growth_H = growth_HT.sum(dim=1) * (1 + ROUNDING)
    total_H = term_HT.sum(dim=1) * (1 + ROUNDING) + ROUNDING * out_HR.norm(dim=1)
    proven = total_H / (1 - growth_H).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(growth_H < 1, proven, float("inf"))


def worst_pages(
    term_HT: Tensor,
    growth_HT: Tensor,
    out_HR: Tensor,
    tolerance: float,
    page_tokens: int = PAGE_TOKENS,
) -> Tensor:
    """Pages to be read exactly, the worst first, so that every head's bound falls to about
    `tolerance` times its output: int64. A page's term counts by the head that it hurts most."""
    term_HN, growth_HN = (
        torch.sum(x.reshape(x.shape[0], -1, page_tokens), dim=2) for x in (term_HT, growth_HT)
    )
    share_HN = term_HN / out_HR.norm(dim=1, keepdim=True) + growth_HN
    order_N = share_HN.amax(dim=0).argsort(descending=True)
    left_HN = share_HN[:, order_N]
    after_HN = left_HN.sum(dim=1, keepdim=True) - left_HN.cumsum(dim=1)
    before_HN = after_HN + left_HN  # of the errors, if the pages before this one are exact
    wanted: Tensor = order_N[: int((before_HN > tolerance).any(dim=0).sum())]
    return wanted
