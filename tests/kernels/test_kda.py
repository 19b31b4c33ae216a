"""Ladder: recurrence (reference), chunked form, then prefill and decode with conv and gate."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertmesh.kernels.kda import reference, torch_ops
from tests.kernels.checks import assert_close, assert_rows_alone, randn

GATES = {"bounded": -5.0, "softplus": None}
Span = tuple[int, int, int, int]


@dataclass
class Case:
    """Inputs of T packed rows, weights, and S slots of state."""

    qkv: Tensor
    z: Tensor
    beta: Tensor
    weights: tuple[Tensor, Tensor, Tensor, float | None]
    conv: Tensor
    state: Tensor

    def prefill(self, ops, spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        conv, state = self.conv.clone(), self.state.clone()
        out = ops.kda_prefill(self.qkv, self.z, self.beta, *self.weights, conv, state, spans)
        return out, conv, state

    def decode(self, ops, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[no-untyped-def]
        conv, state = self.conv.clone(), self.state.clone()
        out = ops.kda_decode(
            self.qkv[rows], self.z[rows], self.beta[rows], *self.weights, conv, state, slots
        )
        return out, conv, state


def make_case(
    tokens: int,
    heads: int,
    dim: int,
    slots: int,
    bound: float | None,
    seed: int = 0,
    width: int = 4,
    sharpness: float = 1.0,
) -> Case:
    channels = 3 * heads * dim
    # Rows of a wider projection: strided, as the model passes them.
    wide = randn(tokens, channels + 8, seed=seed)
    return Case(
        wide[:, :channels],
        randn(tokens, heads, dim, seed=seed + 1) * sharpness,
        randn(tokens, heads, seed=seed + 2),
        (
            randn(channels, width, seed=seed + 3) * 0.5,
            randn(heads, seed=seed + 4),
            randn(heads, dim, seed=seed + 5),
            bound,
        ),
        randn(slots, width - 1, channels, seed=seed + 6),
        randn(slots, heads, dim, dim, seed=seed + 7) * 0.3,
    )


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def assert_all_close(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float = 1e-5
) -> None:
    for a, b in zip(got, expected, strict=True):
        assert_close(a, b, tolerance)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 150),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 8, 20]),
    offset=st.integers(0, 63),
    depth=st.sampled_from([0.0, 0.01, 1.0, 5.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_chunk(rows: int, heads: int, dim: int, offset: int, depth: float, seed: int) -> None:
    """Any gate strength, also one that alternates between nothing and -depth."""
    q, k = (reference.l2_normalise(randn(rows, heads, dim, seed=seed + i)) for i in (1, 2))
    v, state = randn(rows, heads, dim, seed=seed + 3), randn(heads, dim, dim, seed=seed + 4)
    gate = -depth * torch.rand(
        rows, heads, dim, generator=torch.Generator().manual_seed(seed)
    ).round(decimals=1)
    beta = torch.sigmoid(randn(rows, heads, seed=seed + 5) * 3)
    mine, theirs = state.clone(), state.clone()
    got = torch_ops.kda_chunk(q, k, v, gate, beta, mine, offset)
    expected = reference.kda_recurrent(q, k, v, gate, beta, theirs)
    assert_close(got, expected)
    assert_close(mine, theirs)


@pytest.mark.parametrize("steep", [-50.0, -1e4])
def test_chunk_keeps_small_decays_beside_huge_ones(steep: float) -> None:
    """Differences of running sums would lose the small log-decays behind a huge one."""
    rows, dim = 64, 16
    q, k = (reference.l2_normalise(randn(rows, 1, dim, seed=i)) for i in (1, 2))
    v, beta = randn(rows, 1, dim, seed=3), torch.full((rows, 1), 0.9)
    gate = torch.full((rows, 1, dim), -1e-3)
    gate[:32] = steep
    mine, theirs = torch.zeros(1, dim, dim), torch.zeros(1, dim, dim)
    got = torch_ops.kda_chunk(q, k, v, gate, beta, mine)
    assert_close(got, reference.kda_recurrent(q, k, v, gate, beta, theirs), 2e-6)
    assert_close(mine, theirs, 2e-6)


def test_chunk_with_identical_keys() -> None:
    """beta near 1 and one key for all rows: the worst triangular system."""
    q = reference.l2_normalise(randn(128, 2, 16))
    k = reference.l2_normalise(randn(1, 2, 16, seed=1)).expand(128, 2, 16)
    v, gate, beta = randn(128, 2, 16, seed=2), torch.zeros(128, 2, 16), torch.ones(128, 2)
    mine, theirs = torch.zeros(2, 16, 16), torch.zeros(2, 16, 16)
    got = torch_ops.kda_chunk(q, k, v, gate, beta, mine)
    assert_close(got, reference.kda_recurrent(q, k, v, gate, beta, theirs))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=3),
    gap=st.integers(0, 3),
    heads=st.integers(1, 3),
    dim=st.sampled_from([4, 12]),
    width=st.integers(2, 4),
    bound=st.sampled_from(list(GATES.values())),
    sharpness=st.sampled_from([0.0, 1.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_prefill(
    lengths: list[int],
    gap: int,
    heads: int,
    dim: int,
    width: int,
    bound: float | None,
    sharpness: float,
    seed: int,
) -> None:
    """Ragged spans at any position, NaN in every row and slot that belongs to nobody."""
    tokens = sum(lengths) + gap * (len(lengths) + 1)
    case = make_case(tokens, heads, dim, len(lengths) + 2, bound, seed, width, sharpness)
    spans, row = [], gap
    for number, length in enumerate(lengths):
        spans.append((number + 1, row, row + length, seed * (number + 1) % 131))
        row += length + gap
    expected = case.prefill(reference, spans)
    outside = torch.ones(tokens, dtype=torch.bool)
    for _, begin, end, _ in spans:
        outside[begin:end] = False
    for x in (case.qkv, case.z, case.beta):
        x[outside] = float("nan")
    for x in (case.conv, case.state):
        x[0], x[-1] = float("nan"), float("nan")
    out, conv, state = case.prefill(torch_ops, spans)
    assert_close(out, expected[0])
    assert bool((out[outside] == 0).all())
    assert_all_close((conv[1:-1], state[1:-1]), (expected[1][1:-1], expected[2][1:-1]))
    assert bool(conv[[0, -1]].isnan().all()) and bool(state[[0, -1]].isnan().all())


@settings(max_examples=50)
@given(
    rows=st.integers(1, 8),
    heads=st.integers(1, 3),
    dim=st.sampled_from([1, 4, 7, 32]),
    bound=st.sampled_from(list(GATES.values())),
    order=st.permutations(range(10)),
    seed=st.integers(0, 99),
)
def test_decode(
    rows: int, heads: int, dim: int, bound: float | None, order: list[int], seed: int
) -> None:
    case = make_case(rows, heads, dim, 10, bound, seed, sharpness=3.0)
    slots = torch.tensor(order[:rows])
    case.qkv[0] = 0.0  # an all-zero row divides by the epsilon alone
    case.conv[slots[0]] = 0.0
    expected = case.decode(reference, torch.arange(rows), slots)
    idle = [slot for slot in range(10) if slot not in slots]
    case.conv[idle] = case.state[idle] = float("nan")
    out, conv, state = case.decode(torch_ops, torch.arange(rows), slots)
    assert_close(out, expected[0])
    assert_all_close((conv[slots], state[slots]), (expected[1][slots], expected[2][slots]))
    assert bool(conv[idle].isnan().all()) and bool(state[idle].isnan().all())


@pytest.mark.parametrize("slots", [[2, -1, 0, -1, -1], [-1, 1], [-1]])
def test_decode_of_padded_rows(slots: list[int]) -> None:
    """Slot -1: a zero row, whatever its inputs, and no state is touched."""
    case = make_case(len(slots), 2, 16, 3, -5.0)
    padded = torch.tensor(slots) < 0
    expected = case.decode(reference, torch.arange(len(slots)), torch.tensor(slots))
    for x in (case.qkv, case.z, case.beta):
        x[padded] = float("nan")
    got = case.decode(torch_ops, torch.arange(len(slots)), torch.tensor(slots))
    assert bool((got[0][padded] == 0).all())
    assert_all_close(got, expected)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("heads", "dim"), [(4, 32), (2, 64), (3, 12), (4, 96)])
def test_decode_rows_do_not_depend_on_companions(gate: str, heads: int, dim: int) -> None:
    """Any batch, any slot order: runs, gathered and one by one (dim 96) give the same bits."""
    case = make_case(40, heads, dim, 40, GATES[gate])

    def compute(rows: Tensor) -> Tensor:
        out, _, state = case.decode(torch_ops, rows, rows)  # row i lives in slot i
        return torch.cat((out.flatten(1), state[rows].flatten(1)), dim=1)

    assert_rows_alone(compute)
    whole = case.decode(torch_ops, torch.arange(40), torch.arange(40))
    for start, count in ((0, 1), (3, 1), (5, 4), (8, 32)):
        rows = torch.arange(start, start + count)
        out, conv, state = case.decode(torch_ops, rows, rows)
        assert_same((out, conv[rows], state[rows]), tuple(x[rows] for x in whole))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("cuts", [[64], [128], [64, 128, 192], [192]])
@pytest.mark.parametrize("start", [0, 128])
def test_prefill_cut_at_the_grid_is_bit_identical(gate: str, cuts: list[int], start: int) -> None:
    case = make_case(233, 3, 32, 2, GATES[gate])
    whole = case.prefill(torch_ops, [(1, 0, 233, start)])
    assert_same(run_cut(torch_ops, case, cuts, start), whole)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("cuts", [[1], [7], [65], [1, 2, 3, 7, 64, 65, 66, 200]])
def test_prefill_cut_anywhere_is_close(gate: str, cuts: list[int]) -> None:
    case = make_case(233, 3, 32, 2, GATES[gate])
    whole = case.prefill(torch_ops, [(1, 0, 233, 0)])
    assert_all_close(run_cut(torch_ops, case, cuts, 0), whole)


def run_cut(  # type: ignore[no-untyped-def]
    ops, case: Case, cuts: list[int], start: int
) -> tuple[Tensor, Tensor, Tensor]:
    conv, state, outs = case.conv.clone(), case.state.clone(), []
    edges = [0, *cuts, len(case.qkv)]
    for begin, end in pairwise(edges):
        rows = slice(begin, end)
        outs.append(
            ops.kda_prefill(
                case.qkv[rows], case.z[rows], case.beta[rows], *case.weights, conv, state,
                [(1, 0, end - begin, start + begin)],
            )
        )  # fmt: skip
    return torch.cat(outs), conv, state


def test_prefill_spans_do_not_depend_on_companions() -> None:
    case = make_case(200, 4, 32, 5, -5.0)
    spans = [(0, 0, 37, 0), (3, 37, 101, 64), (1, 101, 102, 7), (4, 110, 200, 30)]
    whole = case.prefill(torch_ops, spans)
    for span in spans:
        out, conv, state = case.prefill(torch_ops, [span])
        slot, rows = span[0], slice(span[1], span[2])
        assert_same(
            (out[rows], conv[slot], state[slot]),
            (whole[0][rows], whole[1][slot], whole[2][slot]),
        )


def test_prefill_then_decode_equals_prefill() -> None:
    case = make_case(80, 2, 16, 3, -5.0)
    whole = case.prefill(torch_ops, [(2, 0, 80, 0)])
    conv, state = case.conv.clone(), case.state.clone()
    head = (case.qkv[:70], case.z[:70], case.beta[:70])
    outs = [torch_ops.kda_prefill(*head, *case.weights, conv, state, [(2, 0, 70, 0)])]
    for t in range(70, 80):
        row = slice(t, t + 1)
        outs.append(
            torch_ops.kda_decode(
                case.qkv[row], case.z[row], case.beta[row], *case.weights, conv, state,
                torch.tensor([2]),
            )
        )  # fmt: skip
    assert_all_close((torch.cat(outs), conv, state), whole)


def test_bf16_activations() -> None:
    case = make_case(70, 2, 32, 2, -5.0)
    case.qkv, case.conv = case.qkv.bfloat16(), case.conv.bfloat16()
    case.z, case.beta = case.z.bfloat16(), case.beta.bfloat16()
    spans = [(1, 0, 70, 0)]
    got, expected = case.prefill(torch_ops, spans), case.prefill(reference, spans)
    assert got[0].dtype == torch.float32 and got[1].dtype == torch.bfloat16
    assert_all_close(got, expected, 1e-2)
    slots = torch.tensor([1])
    got = case.decode(torch_ops, slots, slots)
    assert_all_close(got, case.decode(reference, slots, slots), 1e-2)


def test_inputs_are_left_alone() -> None:
    case = make_case(9, 2, 32, 3, None)
    kept = [x.clone() for x in (case.qkv, case.z, case.beta, *case.weights[:3])]
    case.prefill(torch_ops, [(1, 0, 5, 0)])
    case.decode(torch_ops, torch.arange(3), torch.arange(3))
    assert_same((case.qkv, case.z, case.beta, *case.weights[:3]), tuple(kept))
