import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.state.offload.choose import choose_pages


@given(
    heads=st.integers(1, 4),
    pages=st.integers(1, 30),
    share=st.floats(0.01, 1.0),
    least=st.integers(0, 5),
    most=st.integers(1, 40),
    spread=st.floats(0, 8),
    seed=st.integers(0, 99),
)
def test_the_union_of_what_each_head_wants_within_bounds(
    heads: int, pages: int, share: float, least: int, most: int, spread: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    mass = torch.randn(heads, pages, generator=draw) * spread
    hot = torch.randn(heads, generator=draw) * spread
    chosen = choose_pages(mass, hot, share, least, most).tolist()
    assert chosen == sorted(set(chosen)) and len(chosen) <= min(most, pages)
    assert len(chosen) >= min(least, most, pages)
    total = torch.cat([mass, hot.unsqueeze(1)], dim=1).double().logsumexp(dim=1, keepdim=True)
    part = (mass.double() - total).exp()
    lost = part.sum(1) - part[:, chosen].sum(1)
    if len(chosen) < most:  # all that was wanted: no head lacks more than it may
        assert (lost <= 1 - share + 1e-5).all()
    if len(chosen) > least:  # and not more: some head lacks enough with only what is better
        for page in chosen:
            better = part > part[:, page : page + 1]
            lacking = part.sum(1) - (part * better).sum(1)
            assert (lacking > 1 - share - 1e-5).any()


def test_what_is_on_the_device_counts() -> None:
    mass = torch.tensor([[0.0, 1.0, -1.0]])
    assert choose_pages(mass, torch.tensor([12.0]), 0.98, 0, 3).tolist() == []
    assert choose_pages(mass, torch.tensor([-12.0]), 0.98, 0, 3).tolist() == [0, 1, 2]


def test_a_ceiling_keeps_what_matters_most_to_any_head() -> None:
    mass = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 9.0]])
    assert choose_pages(mass, torch.tensor([0.0, 0.0]), 1.0, 0, 2).tolist() == [0, 3]
