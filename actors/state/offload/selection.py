"""One layer's step in mode select: what is read exactly, what is estimated, how good that is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.offload.attend import Attended, Estimates, attend
from expertmesh.actors.state.offload.base_rows import BaseRows
from expertmesh.actors.state.offload.certify import bound, terms, worst_pages
from expertmesh.actors.state.offload.choose import choose_pages
from expertmesh.actors.state.offload.index import SketchIndex
from expertmesh.actors.state.settings import StateSettings

LEAST_PAGES = 4  # a floor, for what a sketch has overlooked


@dataclass(frozen=True, slots=True)
class Query:
    """q_HC: absorbed, float32. hot_KC: rows on the device, float32; hot_HK: their scores. rank: R.
    read: rows of old pages, float32 [n * 64, C]."""

    q_HC: Tensor
    hot_KC: Tensor
    hot_HK: Tensor
    scale: float
    rank: int
    read: Callable[[list[int]], Tensor]


class Selected(NamedTuple):
    """read: pages read exactly. share: of one head's weight, at most, that fell on estimates.
    bound: proven on the relative error of a head's output; infinity where nothing is."""

    out_HR: Tensor
    read: int
    share: float
    bound: float


def select_by_sketch(index: SketchIndex, query: Query, settings: StateSettings) -> Selected:
    """Reads the pages that hold the mass of the attention, by estimate; all else is estimated."""
    guess_HT = index.scores(query.q_HC, query.scale)
    chosen = choose_pages(
        _paged(guess_HT).logsumexp(dim=2),
        query.hot_HK.logsumexp(dim=1),
        settings.select_mass,
        LEAST_PAGES,
        settings.select_pages,
    )
    found = _attend(query, chosen, guess_HT, index)
    return Selected(found.out_HR, len(chosen), _share(found), float("inf"))


def select_certified(base: BaseRows, query: Query, settings: StateSettings) -> Selected | None:
    """Reads pages until no head's output can be further from the exact one than 1 - select_mass
    of its length. None where select_pages are too few for that (kv-state 3.3, refine form)."""
    tolerance = 1 - settings.select_mass
    guess_HT, slack_HT = base.score(query.q_HC, query.scale)
    chosen = torch.empty(0, dtype=torch.int64, device=guess_HT.device)
    found, reached = _certified(base, query, chosen, guess_HT, slack_HT)
    if float(reached.max()) > tolerance:
        distance_HT, errors_T = base.spread(found.out_HR)
        term_HT, growth_HT = terms(found.weights_HT, slack_HT, distance_HT, errors_T)
        chosen = worst_pages(term_HT, growth_HT, found.out_HR, tolerance / 2)
        if len(chosen) > settings.select_pages:
            return None
        chosen = chosen.sort().values
        found, reached = _certified(base, query, chosen, guess_HT, slack_HT)
        if float(reached.max()) > tolerance:
            return None
    return Selected(found.out_HR, len(chosen), _share(found), float(reached.max()))


def _certified(
    base: BaseRows, query: Query, chosen: Tensor, guess_HT: Tensor, slack_HT: Tensor
) -> tuple[Attended, Tensor]:
    """With these pages read: the attention, and the bound on each head's relative error."""
    found = _attend(query, chosen, guess_HT, base)
    distance_HT, errors_T = base.spread(found.out_HR)
    term_HT, growth_HT = terms(found.weights_HT, slack_HT, distance_HT, errors_T)
    length_H = found.out_HR.norm(dim=1)
    return found, bound(term_HT, growth_HT, found.out_HR) / length_H


def _attend(query: Query, chosen: Tensor, guess_HT: Tensor, estimates: Estimates) -> Attended:
    old_KC = query.read(chosen.tolist())
    guess_HT = guess_HT.clone()
    _paged(guess_HT)[:, chosen] = float("-inf")
    rows_KC = torch.cat([query.hot_KC, old_KC])
    scores_HK = torch.cat([query.hot_HK, query.q_HC @ old_KC.t() * query.scale], dim=1)
    return attend(rows_KC, scores_HK, guess_HT, estimates, query.rank)


def _paged(x_HT: Tensor) -> Tensor:
    return x_HT.view(x_HT.shape[0], -1, PAGE_TOKENS)


def _share(found: Attended) -> float:
    return float(found.weights_HT.sum(dim=1).max())
