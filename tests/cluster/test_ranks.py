"""What a newcomer should load: missing experts first, then rare ones, then popular ones."""

import numpy as np

from expertmesh.cluster.placement import Placement, contiguous_placement
from expertmesh.cluster.ranks import ExpertRanks, share_of_newcomer


def test_missing_experts_come_first_and_what_others_will_bring_counts() -> None:
    ranks = ExpertRanks(6, Placement({1: ((0, 1), (1, 2))}))
    assert share_of_newcomer(ranks, 3) == {1: (3, 4, 5)}
    assert share_of_newcomer(ranks, 3, promised=[{1: (3, 4)}]) == {1: (0, 2, 5)}


def test_among_equally_rare_ones_the_popular_come_first() -> None:
    ranks = ExpertRanks(6, contiguous_placement((1, 2), 6, 2))
    loads = {1: np.array([1.0, 9, 1, 1, 8, 1]), 2: np.zeros(6)}
    assert share_of_newcomer(ranks, 2, loads) == {1: (1, 4), 2: (0, 1)}


def test_nobody_gets_more_than_there_is_or_than_fits() -> None:
    ranks = ExpertRanks(4, contiguous_placement((1,), 4, 2))
    assert share_of_newcomer(ranks, 9) == {1: (0, 1, 2, 3)}
    assert share_of_newcomer(ranks, 1) == {1: (0,)}
