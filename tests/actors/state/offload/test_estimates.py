"""Basis, index and attention over estimates."""

import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.offload.attend import attend
from expertmesh.actors.state.offload.basis import fit_basis
from expertmesh.actors.state.offload.index import BLOCK_PAGES, SketchIndex
from tests.support.latents import HEADS, RANK, SCALE, WIDTH, correlated, moment, queries


class Exact:
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def weighted_sum(self, weights_HT: Tensor) -> Tensor:
        return weights_HT @ self.rows


def test_a_basis_for_the_queries_scores_better_than_one_for_the_rows() -> None:
    rows, q = correlated(40), queries(50)
    exact = q @ rows.T
    errors = []
    for known in (moment(), None):
        index = SketchIndex(fit_basis(rows[:2048], known, RANK, SCALE, kept=16))
        for page in rows.view(-1, 64, WIDTH):
            index.add(page)
        errors.append((index.scores(q, 1.0) - exact).std() / exact.std())
    assert errors[0] < 0.2 and errors[0] < 0.5 * errors[1]


def test_a_basis_of_few_rows_or_dead_columns_is_finite() -> None:
    rows = correlated(1)[:3]
    rows[:, 5:9] = 0.25
    basis = fit_basis(rows, moment(), RANK, SCALE)
    assert basis.kept == WIDTH
    for part in (basis.mean_C, basis.encode_CS, basis.decode_CS):
        assert part.isfinite().all()


def test_pages_are_kept_in_order_over_blocks() -> None:
    pages = BLOCK_PAGES + 3
    rows = correlated(pages)
    index = SketchIndex(fit_basis(rows, moment(), RANK, SCALE))
    for page in rows.view(-1, 64, WIDTH):
        index.add(page)
    assert index.pages == pages
    scores = index.scores(queries(HEADS), SCALE)
    exact = queries(HEADS) @ rows.T * SCALE
    assert scores.shape == exact.shape
    assert (scores - exact).abs().mean() < 0.05 * exact.std()
    # Each page's even sum is that of its rows, whatever the sketch has left out.
    for at in (0, BLOCK_PAGES - 1, BLOCK_PAGES, pages - 1):
        weights = torch.zeros(1, pages * 64)
        weights[:, at * 64 : at * 64 + 64] = 1 / 64
        mean = rows[at * 64 : at * 64 + 64].mean(dim=0)
        torch.testing.assert_close(index.weighted_sum(weights)[0], mean, rtol=0, atol=2e-3)


def test_memory_and_bits_are_what_is_held() -> None:
    rows = correlated(2)
    basis = fit_basis(rows, moment(), RANK, SCALE, kept=16)
    index = SketchIndex(basis)
    assert index.nbytes == basis.nbytes == 4 * (WIDTH + 2 * WIDTH * 16)
    index.add(rows[:64])
    block = BLOCK_PAGES * (64 * (8 + 4 + 2) + 2 * WIDTH)
    assert index.nbytes == basis.nbytes + block
    assert index.bits == pytest.approx(8 * 14 / WIDTH + 16 / 64)


@pytest.mark.parametrize("exact", [0, 64, 192])
def test_attention_over_exact_estimates_is_attention(exact: int) -> None:
    """Whichever rows are at hand and whichever are estimated."""
    rows, q = correlated(4), queries(HEADS)
    hot = rows[:64]
    old = torch.cat([rows[64 : 64 + exact]])
    scores = q @ rows.T * SCALE
    guessed = scores[:, 64:].clone()
    guessed[:, :exact] = float("-inf")
    found = attend(torch.cat([hot, old]), scores[:, : 64 + exact], guessed, Exact(rows[64:]), RANK)
    weights = scores.softmax(dim=1)
    torch.testing.assert_close(found.out_HR, weights @ rows[:, :RANK])
    torch.testing.assert_close(found.weights_HT[:, exact:], weights[:, 64 + exact :])
    assert not found.weights_HT[:, :exact].any()


def test_scores_beyond_what_exp_holds() -> None:
    rows = correlated(2)
    scores = torch.full((1, 64), 300.0)
    found = attend(rows[:64], scores, torch.full((1, 64), 290.0), Exact(rows[64:]), RANK)
    assert found.out_HR.isfinite().all()
    assert float(found.weights_HT.sum()) == pytest.approx(4.54e-5, rel=1e-2)
