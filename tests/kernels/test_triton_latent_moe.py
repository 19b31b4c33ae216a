"""Router, gated activation and grouped experts as Triton kernels, interpreted."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.latent_moe import reference, triton_experts, triton_ops
from expertmesh.kernels.latent_moe.tables import ExpertTable, Matrices, Matrix, expert_table
from expertmesh.kernels.latent_moe.triton_experts import block_rows
from expertmesh.kernels.latent_moe.triton_permute import place
from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.launch import recording
from expertmesh.kernels.quant.torch_ops import mxfp4_decode, mxfp4_encode
from tests.kernels.checks import assert_close, randn
from tests.kernels.triton_checks import assert_bf16_close, assert_fence, fenced, spread

# numpy tells when exp(-x) of a sigmoid leaves float32, which gives the right 0.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered")

SITU = Glu("situ", 4.0, 25.0)
GLUS = [SITU, Glu("situ", 4.0), Glu("silu")]


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(0, 5, 2), (3, 1, 1), (5, 37, 5), (2, 130, 16), (3, 896, 16)]
)
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits = fenced(randn(tokens, experts, seed=experts) * 2)
    bias = fenced(randn(experts, seed=1))
    ids, weights = triton_ops.route(logits, bias, top_k, renormalize, 2.5)
    expected = reference.route(logits, bias, top_k, renormalize, 2.5)
    assert ids.dtype == torch.int64 and torch.equal(ids, expected[0])
    assert_close(weights, expected[1])


@pytest.mark.parametrize("axis", [0, 1])
def test_route_of_numbers_that_lie_apart(axis: int) -> None:
    logits, bias = randn(4, 21), randn(21, seed=1)
    ids, weights = triton_ops.route(spread(logits, axis), bias, 3, True, 1.0)
    dense = triton_ops.route(logits, bias, 3, True, 1.0)
    assert torch.equal(ids, dense[0]) and torch.equal(weights, dense[1])


def test_route_takes_the_lowest_id_of_equal_scores() -> None:
    nan = float("nan")
    logits = torch.tensor([[0.0] * 6, [1e4] * 6, [-1e4] * 6, [nan] * 6, [nan, 9, nan, 9, 9, 0.0]])
    bias = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, 0.5])
    ids, weights = triton_ops.route(logits, bias, 4, True, 1.0)
    assert ids.tolist() == [[5, 0, 1, 2]] * 3 + [[0, 1, 2, 3], [0, 2, 5, 1]]
    assert weights[:3].isfinite().all() and weights[3:].isnan().all()


def test_route_bias_selects_but_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([-0.5, 9.0, -1.5, 5.0])
    ids, weights = triton_ops.route(logits, bias, 4, False, 1.0)
    assert ids.tolist() == [[1, 3, 0, 2]] and weights.tolist() == [[0.5] * 4]


@pytest.mark.parametrize("spec", GLUS, ids=str)
@pytest.mark.parametrize("width", [5, 96])
def test_glu(spec: Glu, width: int) -> None:
    x = randn(11, 2 * width) * torch.logspace(-4, 2, 11).unsqueeze(1)
    got = triton_ops.glu(fenced(x), spec)
    expected = reference.glu(x.double(), spec)
    assert_close(got, expected.float())
    # Small values keep their digits too.
    torch.testing.assert_close(got[:5], expected[:5].float(), rtol=2e-6, atol=0.0)
    low = x.bfloat16()
    for axis in (0, 1):
        got = triton_ops.glu(spread(low, axis), spec)
        assert_bf16_close(got, reference.glu(low.float(), spec))


def test_glu_passes_on_what_is_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 1.0, 30.0, -inf], [1.0, nan, inf, 2.0]]).reshape(2, 4)
    got = triton_ops.glu(x, SITU)
    assert torch.equal(got.isnan(), reference.glu(x, SITU).isnan())
    assert_close(got.nan_to_num(), reference.glu(x, SITU).nan_to_num())
    assert triton_ops.glu(torch.empty(0, 6), SITU).shape == (0, 3)


class Layer:
    """Experts by id, in memory as `stored` says, with everything around them poisoned."""

    def __init__(self, held: Mapping[int, str], width: int, inner: int, experts: int = 9) -> None:
        self.experts, self.inner = experts, inner
        self.dense: dict[int, tuple[Tensor, Tensor]] = {}
        self.matrices: dict[int, Matrices] = {}
        for expert, stored in held.items():
            found = [
                self._matrix(stored, rows, columns, seed=3 * expert + at)
                for at, (rows, columns) in enumerate(
                    [(inner, width), (width, inner), (inner, width)]
                )
            ]
            w1, w2, w3 = (matrix for matrix, _ in found)
            self.matrices[expert] = w1, w2, w3
            self.dense[expert] = torch.cat([found[0][1], found[2][1]]), found[1][1]

    @staticmethod
    def _matrix(stored: str, rows: int, columns: int, seed: int) -> tuple[Matrix, Tensor]:
        exact = randn(rows, columns, seed=seed) / columns**0.5
        if stored == "packed":
            codes, scales = mxfp4_encode(exact)
            return (fenced(codes), fenced(scales)), mxfp4_decode(codes, scales)
        matrix = fenced(exact.to(torch.bfloat16 if stored == "bf16" else torch.float32))
        return matrix, matrix.float()

    def only(self, experts: set[int]) -> "Layer":
        part = object.__new__(Layer)
        part.experts, part.inner, part.dense = self.experts, self.inner, self.dense
        part.matrices = {e: m for e, m in self.matrices.items() if e in experts}
        return part

    def __call__(self, expert: int) -> tuple[Tensor, Tensor]:
        return self.dense[expert]

    def table(self) -> ExpertTable:
        return expert_table(self.matrices, self.experts, self.inner, "cpu")


def draw(
    tokens: int, width: int, top_k: int, among: list[int], local: float, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """z, ids with -1 where an expert is elsewhere, weights with NaN there, as rows without any."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(tokens, len(among), generator=generator).argsort(-1)[:, :top_k]
    ids = torch.tensor(among, dtype=torch.int64)[picks]
    ids = ids.masked_fill(torch.rand(ids.shape, generator=generator) >= local, -1)
    if local < 1.0:
        ids[1:2] = -1
    weights = randn(tokens, top_k, seed=seed + 1).masked_fill(ids < 0, float("nan"))
    z = randn(tokens, width, seed=seed + 2)
    return z.masked_fill((ids < 0).all(-1, keepdim=True), float("nan")), ids, weights


HELD = {
    "packed": dict.fromkeys((1, 2, 5, 8), "packed"),
    "bf16": dict.fromkeys((0, 7), "bf16"),
    "float32": dict.fromkeys((3, 4, 6), "float32"),
    "mixed": {8: "packed", 0: "bf16", 5: "packed", 4: "float32"},
}


@pytest.mark.parametrize(
    ("held", "width", "inner", "tokens", "spec", "sum_dtype"),
    [
        ("packed", 96, 64, 9, SITU, torch.float32),
        ("packed", 32, 160, 5, GLUS[1], torch.float64),
        ("bf16", 19, 7, 5, GLUS[2], torch.float32),
        ("float32", 24, 70, 35, SITU, torch.float64),  # more rows of an expert than a block has
        ("mixed", 64, 32, 7, GLUS[2], torch.float32),
    ],
)
def test_partial_sum(
    held: str, width: int, inner: int, tokens: int, spec: Glu, sum_dtype: torch.dtype
) -> None:
    layer = Layer(HELD[held], width, inner)
    z, ids, weights = map(fenced, draw(tokens, width, 2, [*HELD[held]], 0.8))
    got = triton_ops.experts_partial_sum(z, ids, weights, layer, spec, sum_dtype=sum_dtype)
    expected = reference.experts_partial_sum(z, ids, weights, layer, spec, sum_dtype=sum_dtype)
    assert_close(got, expected)
    absent = (ids < 0).all(-1)
    assert absent.any() and bool((got[absent] == 0).all())
    for tensor in (z, ids, weights):
        assert_fence(tensor)


@pytest.mark.parametrize("held", ["packed", "bf16"])
def test_partial_sum_in_bf16(held: str) -> None:
    """Off by the rounding of the hidden values and of the terms, relative to what is added up."""
    layer = Layer(HELD[held], 64, 32)
    z, ids, weights = draw(9, 64, 2, [*HELD[held]], 0.8)
    low = z.bfloat16()
    got = triton_ops.experts_partial_sum(spread(low), ids, weights, layer, SITU)
    exact = torch.zeros(9, 64, dtype=torch.float64)
    size = torch.zeros(9, 64, dtype=torch.float64)
    for t, k in (ids >= 0).nonzero().tolist():
        w13, w2 = (one.double() for one in layer(int(ids[t, k])))
        hidden = reference.glu((w13 @ low[t].double()).unsqueeze(0).float(), SITU)[0].double()
        exact[t] += weights[t, k].double() * (w2 @ hidden)
        size[t] += weights[t, k].double().abs() * (w2.abs() @ hidden.abs())
    assert got.dtype == torch.float32 and not got.isnan().any()
    assert bool(((got - exact).abs() <= 2.0**-8 * size + 1e-6).all())


def test_rows_do_not_touch_each_other() -> None:
    """To the last bit in the same places; in others the matmul of the interpreter rounds otherwise,
    which the tensor cores do not."""
    layer = Layer(HELD["mixed"], 64, 32)
    z, ids, weights = draw(15, 64, 3, [*HELD["mixed"]], 0.9)
    whole = triton_ops.experts_partial_sum(z, ids, weights, layer, SITU)
    poisoned = z.clone()
    poisoned[::2] = float("nan")
    got = triton_ops.experts_partial_sum(poisoned, ids, weights, layer, SITU)
    assert torch.equal(got[1::2], whole[1::2])
    rows = torch.tensor([14, 0, 7, 2])
    few = triton_ops.experts_partial_sum(z[rows], ids[rows], weights[rows], layer, SITU)
    assert_close(few, whole[rows], 2e-6)


def test_many_tokens_go_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(HELD["bf16"], 32, 32)
    z, ids, weights = draw(7, 32, 2, [*HELD["bf16"]], 0.9)
    monkeypatch.setattr(triton_experts, "MOST_TOKENS", 3)
    apart = (spread(x, 1) for x in (z, ids, weights))
    got = triton_ops.experts_partial_sum(*apart, layer, SITU)
    assert_close(got, reference.experts_partial_sum(z, ids, weights, layer, SITU))


def test_float64_sums_of_two_processes_give_the_float32_of_one() -> None:
    layer = Layer(HELD["mixed"], 64, 32)
    z, ids, weights = draw(6, 64, 4, [*HELD["mixed"]], 1.0)
    weights *= torch.logspace(-4, 4, 4)

    def sums(mine: Layer) -> Tensor:
        masked = torch.where(torch.isin(ids, torch.tensor([*mine.matrices])), ids, -1)
        args = (z, masked, weights, mine, SITU)
        return triton_ops.experts_partial_sum(*args, sum_dtype=torch.float64)

    parts = [sums(layer.only({8, 4})), sums(layer.only({0, 5}))]
    assert torch.equal((parts[1] + parts[0]).float(), sums(layer).float())


def test_an_expert_that_is_not_held_gives_nan_and_spoils_no_other_row() -> None:
    layer = Layer(HELD["packed"], 32, 32)
    z, ids, weights = draw(4, 32, 2, [*HELD["packed"]], 1.0)
    expected = reference.experts_partial_sum(z, ids, weights, layer, SITU)
    ids[1, 0], ids[2, 1] = 3, 1 << 40  # not here; no expert at all
    got = triton_ops.experts_partial_sum(z, ids, weights, layer, SITU)
    assert got[1:3].isnan().all()
    assert_close(got[[0, 3]], expected[[0, 3]])


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("held", [{}, {4: "bf16"}], ids=["none held", "one held"])
def test_rows_without_an_expert(tokens: int, held: dict[int, str]) -> None:
    z, ids = torch.full((tokens, 32), float("nan")), torch.full((tokens, 2), -1)
    weights = torch.full((tokens, 2), float("nan"))
    got = triton_ops.experts_partial_sum(z, ids, weights, Layer(held, 32, 32), SITU)
    assert torch.equal(got, torch.zeros(tokens, 32))


@pytest.mark.parametrize("rows", [16, 32])
def test_place_puts_every_pair_into_one_block_of_its_expert(rows: int) -> None:
    layer = Layer({}, 32, 32, experts=11).table()
    slots = torch.tensor([-1, 0, 3, -1, 1, 2, -1, 4, -1, -1, -1], dtype=torch.int32)
    held = 5
    table = ExpertTable(slots, torch.zeros(held, 7, dtype=torch.int64), (1,), 32, layer.tensors)
    generator = torch.Generator().manual_seed(rows)
    ids = torch.rand(300, 11, generator=generator).argsort(-1)[:, :3]
    ids[:, 0] = 4  # many rows of one expert
    ids[:, 1:][ids[:, 1:] == 4] = 7
    ids[ids == 5] = -1  # and none of another
    made = place(ids, table, rows)
    assert made.rows == 900 and made.blocks == 900 // rows + held

    flat, position = ids.flatten(), made.position.flatten()
    local = torch.where(flat >= 0, slots[flat.clamp(min=0)].long(), -1)
    assert torch.equal(position < 0, local < 0)
    assert torch.equal(position == -2, (flat >= 0) & (local < 0))
    order = local[local >= 0].argsort(stable=True)
    expected = (local >= 0).nonzero().flatten()[order]
    assert torch.equal(made.order[: len(expected)].long(), expected)
    assert torch.equal(position[expected], torch.arange(len(expected), dtype=torch.int32))

    covered = []
    for slot, first, end in made.listed.T.tolist():
        if slot >= 0:
            here = range(first, min(first + rows, end))
            assert len(here) and {int(local[made.order[r]]) for r in here} == {slot}
            covered += here
    assert sorted(covered) == list(range(len(expected)))


def test_ids_that_repeat_write_nothing_outside() -> None:
    """No router chooses an expert twice; a broken message might."""
    layer = Layer({3: "bf16", 7: "bf16"}, 32, 32)
    ids = torch.tensor([[3, 7, 3, 3], [7, 7, -1, 3]] * 9)
    made = place(ids, layer.table(), 16)
    assert made.rows == 36 == made.order.numel() < int((ids >= 0).sum())
    assert torch.equal(made.position.flatten()[made.order], torch.arange(36, dtype=torch.int32))
    _, first, end = made.listed[:, made.listed[0] >= 0]
    assert int(end.max()) == 36 and bool((first < end).all())
    z, weights = randn(18, 32), torch.ones(18, 4)
    got = triton_ops.experts_partial_sum(z, ids, weights, layer, SITU)
    assert torch.equal(got.isnan().all(1), (made.position == -2).any(1))


def test_block_sizes_follow_the_rows_of_an_expert() -> None:
    def table(held: int) -> ExpertTable:
        slots = torch.zeros(896, dtype=torch.int32)
        return ExpertTable(slots, torch.zeros(held, 7, dtype=torch.int64), (1,), 32, ())

    bf16, f32 = torch.bfloat16, torch.float32
    assert block_rows(64, 16, table(15), bf16) == 16  # an expert actor decodes
    assert block_rows(512, 16, table(15), bf16) == 32
    assert block_rows(4096, 16, table(15), bf16) == 128
    assert block_rows(4096, 16, table(15), f32) == 64
    assert block_rows(64, 16, table(896), bf16) == 16  # all experts in one process
    assert block_rows(4096, 16, table(896), bf16) == 128
    assert block_rows(1, 16, table(0), bf16) == 16


def test_launches_need_no_look_at_the_device() -> None:
    class OnMeta(Layer):
        def table(self) -> ExpertTable:
            part = {
                expert: (_meta(w1), _meta(w2), _meta(w3))
                for expert, (w1, w2, w3) in self.matrices.items()
            }
            return expert_table(part, self.experts, self.inner, "meta")

    args = [one.to("meta") for one in draw(6, 32, 2, [8, 0], 1.0)]
    with recording() as launches:
        out = triton_ops.experts_partial_sum(*args, OnMeta(HELD["mixed"], 32, 32), SITU)
    assert out.shape == (6, 32) and out.dtype == torch.float32
    names = [launch.name for launch in launches]
    products = ["gate_up_kernel", "down_kernel"]
    assert names == ["place_kernel", *products * 3, "weighted_sum_kernel"]


def _meta(matrix: Matrix) -> Matrix:
    if isinstance(matrix, tuple):
        return matrix[0].to("meta"), matrix[1].to("meta")
    return matrix.to("meta")


def _odd(make: Callable[[Tensor], Tensor]) -> dict[int, Matrices]:
    good = torch.zeros(32, 32, dtype=torch.bfloat16)
    return {6: (good, make(good), good)}


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (_odd(lambda w: w.float()), "expert 6: its matrices are stored in different ways"),
        (_odd(lambda w: w.t()[1:].t()), "expert 6: a matrix is not dense row by row"),
        (_odd(lambda w: w.view(-1)[1:-31].view(31, 32)), "expert 6: .* 16-byte boundary"),
        ({6: (torch.zeros(4, 4, dtype=torch.float16),) * 3}, "no kernel reads experts of .*16"),
        (_odd(lambda w: w[1:]), "expert 6: w1, w3, w2 of .*31, 32"),
        (_odd(lambda w: w) | {7: (torch.zeros(32, 64, dtype=torch.bfloat16),) * 3}, "expert 7: w1"),
        ({6: ((torch.zeros(32, 32).byte(), torch.zeros(32, 1).byte()),) * 3}, "expert 6: .*0, 0"),
    ],
)
def test_a_table_refuses_what_a_kernel_can_not_read(
    held: Mapping[int, Matrices], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        expert_table(held, 9, 32, "cpu")
