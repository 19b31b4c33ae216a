"""Packed linear: the stored product, and rows that do not depend on their companions."""

import pytest
import torch

from expertmesh.kernels.linear import half, reference, torch_ops
from expertmesh.kernels.linear.half import PERIOD, full_rows, to_half
from expertmesh.kernels.linear.torch_ops import PREPACK_ELEMENTS
from tests.kernels.checks import assert_rows_alone, randn

SHAPES = [(7, 32), (96, 64), (331, 64), (1024, 256), (513, 520)]  # N, K; the last two prepacked


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_matches_reference(width: int, depth: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(width, depth, generator=generator) * depth**-0.5
    x = torch.randn(9, depth, generator=generator)
    fast, slow = torch_ops.pack_linear(weight), reference.pack_linear(weight)
    torch.testing.assert_close(fast(x), slow(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("width", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(width: int, depth: int) -> None:
    assert 513 * 520 >= PREPACK_ELEMENTS > 331 * 64
    generator = torch.Generator().manual_seed(depth)
    weight = torch.randn(width, depth, generator=generator)
    x = torch.randn(200, depth, generator=generator)
    apply = torch_ops.pack_linear(weight)
    whole = apply(x)
    for begin, rows in [(0, 4), (0, 5), (3, 8), (100, 33), (50, 64), (7, 130), (196, 4)]:
        assert torch.equal(apply(x[begin : begin + rows]), whole[begin : begin + rows])
    # A slice of a wider projection is not contiguous.
    wide = torch.randn(40, depth + 32, generator=generator)
    assert torch.equal(apply(wide[:, :depth]), apply(wide[:, :depth].contiguous()))


@pytest.mark.parametrize(("width", "depth"), [*SHAPES, (1, 1), (33, 129)])
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e12])
def test_bf16_weights_are_kept_in_float16_without_a_loss(
    width: int, depth: int, scale: float
) -> None:
    weight = (randn(width, depth) * scale * depth**-0.5).bfloat16().float()
    made = to_half(weight)
    assert made is not None and made.nbytes == weight.nbytes // 2
    assert torch.equal(made.dense(), weight)
    x = randn(9, depth, seed=1)
    expected = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(made(x), expected, rtol=1e-5, atol=1e-5 * scale)


def test_float16_products_compute_every_row_alone() -> None:
    apply = torch_ops.pack_linear(randn(96, 64).half().float())
    x = randn(300, 64, seed=1)
    assert_rows_alone(lambda rows: apply(x[:40][rows]))
    whole = apply(x)
    for rows in range(1, 300):
        assert torch.equal(apply(x[300 - rows :]), whole[300 - rows :])


def test_products_on_all_threads_have_the_same_bits() -> None:
    weight, x = randn(640, 520).bfloat16().float(), randn(70, 520, seed=1)
    alone, threads = to_half(weight), torch.get_num_threads()
    assert alone is not None
    torch.set_num_threads(2)
    try:
        spread = to_half(weight, spread=True)
        assert spread is not None and torch.equal(spread.dense(), weight)
        for rows in range(1, 71):
            assert torch.equal(spread(x[:rows]), alone(x[:rows]))
    finally:
        torch.set_num_threads(threads)


def test_float16_products_into_a_buffer() -> None:
    made, x = to_half(randn(70, 48).bfloat16().float()), randn(9, 48, seed=1)
    assert made is not None
    wide, out = randn(9, 96), torch.full((20, 70), float("nan"))
    wide[:, :48] = x
    made.into(wide[:, :48], out[5:14])
    assert torch.equal(out[5:14], made(x))
    assert out[:5].isnan().all() and out[14:].isnan().all()
    assert made(x[:0]).shape == (0, 70)


def test_padded_rows_are_few() -> None:
    for rows in range(3 * PERIOD):
        assert rows <= full_rows(rows) <= rows + 3


@pytest.mark.parametrize(
    "weight",
    [
        torch.tensor([[1.0, 1.0 + 2.0**-12]]),  # too many digits
        torch.tensor([[1.0, 2.0**-40]]),  # too far apart
        torch.tensor([[1.0, float("inf")]]),
        torch.tensor([[1.0, float("nan")]]),
        torch.ones(0, 4),
        torch.ones(4, 4, dtype=torch.float64),
        torch.ones(4, 4, device="meta"),
    ],
)
def test_other_weights_are_not_kept_in_float16(weight: torch.Tensor) -> None:
    assert to_half(weight) is None


def test_without_the_product_everything_is_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = randn(64, 64).half().float(), randn(5, 64)
    monkeypatch.delattr(torch, "fbgemm_pack_gemm_matrix_fp16")
    half._table.cache_clear()
    try:
        assert not half.available() and to_half(weight) is None
        torch.testing.assert_close(torch_ops.pack_linear(weight)(x), x @ weight.t())
    finally:
        monkeypatch.undo()
        half._table.cache_clear()
    assert half.available()


@pytest.mark.parametrize("native", [False, True])
def test_bf16_products_on_a_cpu_that_has_them_and_on_one_that_has_not(
    monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    monkeypatch.setattr(half, "native_bf16", lambda: native)
    weight, x = (randn(96, 64) / 8).bfloat16(), randn(9, 64, seed=1).bfloat16()
    assert (to_half(weight) is None) == native
    got = torch_ops.pack_linear(weight)(x)
    assert got.dtype == torch.bfloat16
    exact = x.double() @ weight.double().t()
    torch.testing.assert_close(got.double(), exact, rtol=2.0**-8, atol=1e-5)
