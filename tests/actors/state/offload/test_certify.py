"""No output may be further from the exact one than is claimed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.state.offload.base_rows import BaseRows
from expertmesh.actors.state.offload.certify import bound, terms
from expertmesh.actors.state.offload.selection import Query, select_certified
from expertmesh.actors.state.settings import StateSettings
from tests.support.latents import HEADS, RANK, SCALE, WIDTH, correlated, queries


def asked(rows: torch.Tensor, peak: float, seed: int) -> Query:
    """Of 2 pages on the device and others that are not; `read` gives exact rows."""
    q = queries(HEADS, seed)
    q *= peak / (q @ rows.T * SCALE).std(dim=1, keepdim=True)
    hot, old = rows[:128], rows[128:].view(-1, 64, WIDTH)
    return Query(q, hot, q @ hot.T * SCALE, SCALE, RANK, lambda at: old[at].flatten(0, 1))


def exact(query: Query, rows: torch.Tensor) -> torch.Tensor:
    weights = (query.q_HC.double() @ rows.double().T * SCALE).softmax(dim=1)
    return weights @ rows[:, :RANK].double()


def based(rows: torch.Tensor, bits: int) -> BaseRows:
    base = BaseRows(bits, WIDTH, torch.device("cpu"))
    for page in rows[128:].view(-1, 64, WIDTH):
        base.add(page)
    return base


@given(
    bits=st.sampled_from([4, 8]),
    mass=st.sampled_from([0.5, 0.9, 0.98, 0.999]),
    peak=st.floats(0.01, 4),
    most=st.integers(1, 12),
    seed=st.integers(0, 200),
)
def test_the_error_is_within_the_bound_or_all_is_read(
    bits: int, mass: float, peak: float, most: int, seed: int
) -> None:
    rows = correlated(12, seed)
    query = asked(rows, peak, seed)
    settings = StateSettings(select_mass=mass, select_pages=most)
    found = select_certified(based(rows, bits), query, settings)
    if found is None:
        return
    assert found.read <= most and found.bound <= 1 - mass
    expected = exact(query, rows)
    error = (found.out_HR - expected).norm(dim=1) / found.out_HR.norm(dim=1)
    assert (error <= found.bound).all()


def test_the_bound_is_no_larger_than_errors_may_be() -> None:
    """One head and the worst that estimates may do: half the bound would not hold."""
    none = torch.zeros(1, 8)
    weights, side = torch.full((1, 8), 1 / 8), torch.tensor([3.0, 4.0])
    # All values off by as much, the same way, none of the scores.
    out, errors = torch.tensor([[2.0, 1.0]]), torch.full((8,), side.norm())
    claimed = bound(*terms(weights, none, none, errors), out)
    assert side.norm() <= claimed < 1.01 * side.norm()
    # One score too low by all its slack, on which all of the difference hangs.
    slack, values = none.clone(), torch.zeros(8, 2)
    slack[0, 0], values[0] = 0.5, side
    out, scores = weights @ values, weights.log()
    distance = (values - out).norm(dim=1)[None]
    error = ((scores + slack).softmax(dim=1) @ values - out).norm()
    claimed = bound(*terms(weights, slack, distance, torch.zeros(8)), out)
    assert error <= claimed < 1.3 * error


def test_scores_are_within_their_slack_and_values_within_their_distance() -> None:
    rows = correlated(6, 3)
    query = asked(rows, 2.0, 3)
    for bits in (4, 8):
        base = based(rows, bits)
        scored = base.score(query.q_HC, SCALE)
        error = (scored.scores_HT - query.q_HC @ rows[128:].T * SCALE).abs()
        assert (error <= scored.slack_HT).all() and error.max() > 0.01 * scored.slack_HT.max()
        out = exact(query, rows).float()
        distance, errors = base.spread(out)
        away = torch.cdist(out.double(), rows[128:, :RANK].double())
        assert (away <= distance + errors).all()
        eye = torch.eye(256)
        assert ((base.weighted_sum(eye) - rows[128:]).norm(dim=1) <= errors * (1 + 1e-5)).all()


def test_one_sharp_head_reads_little_in_eight_bits() -> None:
    rows = correlated(42, 1)
    query = asked(rows, 0.5, 1)
    needle = 128 + 64 * 17 + 5
    rows[needle] *= 3
    query.q_HC[:] = rows[needle] * (18 / (rows[needle] @ rows[needle] * SCALE))
    settings = StateSettings(select_mass=0.99, select_pages=20)
    found = select_certified(based(rows, 8), query, settings)
    assert found is not None and found.read <= 4 and 0 < found.bound <= 0.01


def test_none_where_it_cannot_be_proven() -> None:
    rows = correlated(12, 5)
    settings = StateSettings(select_mass=0.9999, select_pages=1)
    assert select_certified(based(rows, 4), asked(rows, 1.0, 5), settings) is None


def test_memory_is_that_of_the_base() -> None:
    rows = correlated(4)
    for bits, inner in ((8, WIDTH), (4, WIDTH // 2)):
        base = based(rows, bits)
        assert base.pages == 2
        assert base.nbytes == pytest.approx(128 * (inner + 6), abs=128 * 4)
