import pytest
import torch

from expertmesh.kernels.sketch import reference, torch_ops
from expertmesh.kernels.sketch.types import Basis

WIDTH, KEPT, WIDE, TOKENS, HEADS = 24, 14, 4, 70, 3


@pytest.fixture
def basis() -> Basis:
    draw = torch.Generator().manual_seed(1)
    made = [
        torch.randn(*shape, generator=draw) for shape in ((WIDTH,), (WIDTH, KEPT), (WIDTH, KEPT))
    ]
    return Basis(*made, WIDE)


@pytest.fixture
def rows() -> torch.Tensor:
    rows = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    rows[7] = 0
    rows[8] *= 1e4  # beyond what a float16 scale holds
    return rows


def whole_basis(rows: torch.Tensor) -> Basis:
    """Nothing is left out, and all of it in 8 bits."""
    eye = torch.eye(WIDTH)
    return Basis(rows.mean(dim=0), eye, eye, WIDTH)


def test_encode(basis: Basis, rows: torch.Tensor) -> None:
    slow, fast = reference.sketch_encode(rows, basis), torch_ops.sketch_encode(rows, basis)
    assert fast[0].shape == (TOKENS, basis.code_bytes) == (TOKENS, 4 + 5)
    torch.testing.assert_close(fast[1], slow[1], rtol=1e-3, atol=0)
    # A value on the border of two codes may fall to either side: by the order of a sum.
    assert (fast[0] != slow[0]).float().mean() < 0.01


def test_a_row_beyond_all_scales_keeps_its_direction(basis: Basis, rows: torch.Tensor) -> None:
    codes, scales = torch_ops.sketch_encode(rows * 1e3, basis)
    assert scales.isfinite().all()
    assert torch_ops.sketch_decode(codes, scales, basis).isfinite().all()


def test_decode(basis: Basis, rows: torch.Tensor) -> None:
    codes, scales = reference.sketch_encode(rows, basis)
    expected = reference.sketch_decode(codes, scales, basis)
    torch.testing.assert_close(torch_ops.sketch_decode(codes, scales, basis), expected)
    mean = basis.mean_C
    error = expected - (rows - mean) @ basis.encode_CS
    step = scales.float().unsqueeze(1) / torch.tensor([127.0] * WIDE + [7.0] * (KEPT - WIDE))
    within = error.abs() <= 0.501 * step + 1e-3 * scales.float().unsqueeze(1)
    assert within[torch.arange(TOKENS) != 8].all()


def test_every_code_comes_back(basis: Basis) -> None:
    codes = torch.randint(0, 256, (256, basis.code_bytes), dtype=torch.uint8)
    codes[:, 0] = torch.arange(256)
    codes[:, WIDE] = torch.arange(256)
    scales = torch.rand(256).half()
    torch.testing.assert_close(
        torch_ops.sketch_decode(codes, scales, basis), reference.sketch_decode(codes, scales, basis)
    )


def test_scores_and_sums(basis: Basis, rows: torch.Tensor) -> None:
    codes, scales = reference.sketch_encode(rows, basis)
    q = torch.randn(HEADS, WIDTH)
    weights = torch.rand(HEADS, TOKENS)
    for name, argument, more in (("sketch_scores", q, (0.3,)), ("sketch_sum", weights, ())):
        slow, fast = (getattr(home, name) for home in (reference, torch_ops))
        expected = slow(argument, codes, scales, basis, *more)
        got = fast(argument, codes, scales, basis, *more)
        torch.testing.assert_close(
            got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
        )


def test_a_basis_that_keeps_all_gives_the_rows_themselves(rows: torch.Tensor) -> None:
    rows = rows[:7]
    basis = whole_basis(rows)
    codes, scales = torch_ops.sketch_encode(rows, basis)
    step = scales.float().max() / 127
    one = torch.eye(7)
    assert (torch_ops.sketch_sum(one, codes, scales, basis) - rows).abs().max() < 0.51 * step
    q = torch.randn(HEADS, WIDTH)
    error = torch_ops.sketch_scores(q, codes, scales, basis, 0.5) - 0.5 * q @ rows.T
    assert error.abs().max() < 0.5 * 0.51 * step * q.abs().sum(dim=1).max()


def test_no_tokens(basis: Basis) -> None:
    codes, scales = torch_ops.sketch_encode(torch.empty(0, WIDTH), basis)
    assert torch_ops.sketch_scores(torch.ones(1, WIDTH), codes, scales, basis, 1.0).shape == (1, 0)
    total = torch_ops.sketch_sum(torch.ones(1, 0), codes, scales, basis)
    assert torch.equal(total, torch.zeros(1, WIDTH))
