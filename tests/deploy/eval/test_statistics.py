import math

import pytest
from scipy.stats import binomtest

from expertmesh.deploy.eval.statistics import Loss, Share


@pytest.mark.parametrize(("right", "n"), [(0, 5), (5, 5), (1, 400), (380, 400), (7, 20)])
def test_shares_have_wilsons_interval(right: int, n: int) -> None:
    share, known = Share.of(right, n), binomtest(right, n).proportion_ci(0.95, "wilson")
    assert share.share == right / n
    assert (share.low, share.high) == pytest.approx((known.low, known.high), abs=1e-12)


def test_none_and_all_are_ends_of_their_intervals() -> None:
    for n in range(1, 200):
        none, every = Share.of(0, n), Share.of(n, n)
        assert none.low == none.share == 0 < none.high
        assert every.low < every.share == every.high == 1


def test_a_share_of_nothing_says_nothing() -> None:
    share = Share.of(0, 0)
    assert math.isnan(share.share) and (share.low, share.high) == (0.0, 1.0)


def test_a_loss_counts_changed_answers_only() -> None:
    first = [True] * 90 + [False] * 10
    second = [True] * 87 + [False] * 3 + [True] + [False] * 9
    loss = Loss.of(first, second)
    assert (loss.n, loss.lost, loss.gained, loss.points) == (100, 3, 1, 2.0)
    assert loss.low < 0 < 2 < loss.high


def test_no_change_is_no_proof_of_no_loss() -> None:
    loss = Loss.of([True] * 400, [True] * 400)
    assert loss.points == 0 and loss.low < 0 < loss.high < 1


def test_answers_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        Loss.of([True], [True, False])
