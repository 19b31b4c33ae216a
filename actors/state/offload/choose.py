"""Which old pages a query reads exactly (kv-state 3.4): those that hold the mass of its attention,
by estimate, instead of a fixed number."""

import torch
from torch import Tensor


def choose_pages(mass_HN: Tensor, hot_H: Tensor, share: float, least: int, most: int) -> Tensor:
    """Indices of pages, ascending, int64.

    mass_HN: log of the estimated sum of exp(score) of each old page; hot_H: the exact one of what
    is on the device. Each head wants the fewest pages that, with those on the device, hold `share`
    of its mass. All heads read the union: at least `least` pages, at most `most`, then those with
    the largest share of any head.
    """
    pages = mass_HN.shape[1]
    total_H1 = torch.logaddexp(torch.logsumexp(mass_HN, dim=1), hot_H).unsqueeze(1)
    share_HN = (mass_HN - total_H1).exp()
    ordered, order = share_HN.sort(dim=1, descending=True)
    left = ordered.sum(dim=1, keepdim=True) - ordered.cumsum(dim=1) + ordered
    wanted_HN = torch.zeros_like(share_HN, dtype=torch.bool).scatter_(1, order, left > 1 - share)
    best_N = share_HN.amax(dim=0)
    wanted = int(wanted_HN.any(dim=0).sum())
    count = min(pages, most, max(wanted, least))
    # Pages that a head wants come first, so that the best `count` of all are the union or less.
    ranked = best_N + wanted_HN.any(dim=0)
    return ranked.topk(count).indices.sort().values
