"""The Triton kernels in the interpreter, against the equations."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from expertmesh.kernels.kda import reference, triton_ops
from expertmesh.kernels.kda.triton_common import log_decay, operand
from expertmesh.kernels.launch import launch
from tests.kernels.checks import assert_close
from tests.kernels.test_kda import (
    GATES,
    Case,
    Span,
    assert_all_close,
    assert_same,
    make_case,
    run_cut,
)
from tests.kernels.triton_checks import assert_fence, fenced, spread


def fence(case: Case) -> Case:
    """The same numbers with 1e30 around and between what may be read."""
    weight, *others, bound = case.weights
    weight = fenced(weight.t().contiguous()).t()  # tap by tap, as the model keeps it
    return Case(
        spread(case.qkv),
        spread(case.z),
        spread(case.beta),
        (weight, *(fenced(x) for x in others), bound),  # type: ignore[arg-type]
        fenced(case.conv),
        fenced(case.state),
    )


def decode(case: Case, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place, and nothing beside the pools may change."""
    out = triton_ops.kda_decode(
        case.qkv, case.z, case.beta, *case.weights, case.conv, case.state, slots
    )
    assert_fence(case.conv)
    assert_fence(case.state)
    return out, case.conv, case.state


def in_bf16(case: Case) -> Case:
    """Activations and window as a bfloat16 model has them; weights and state stay float32."""
    activations = (x.bfloat16() for x in (case.qkv, case.z, case.beta))
    return Case(*activations, case.weights, case.conv.bfloat16(), case.state)


@pytest.mark.parametrize(
    ("rows", "heads", "dim", "width", "gate"),
    [
        (2, 3, 16, 4, "bounded"),
        (2, 1, 60, 3, "softplus"),
        (1, 1, 128, 4, "bounded"),
        (3, 1, 7, 2, "softplus"),
        (1, 2, 32, 1, "bounded"),
    ],
)
def test_decode(rows: int, heads: int, dim: int, width: int, gate: str) -> None:
    case = make_case(rows, heads, dim, rows + 3, GATES[gate], width=width, sharpness=3.0)
    slots = torch.randperm(rows + 3, generator=torch.Generator().manual_seed(rows))[:rows]
    case.qkv[0] = 0.0  # an all-zero row divides by the epsilon alone
    case.conv[slots[0]] = 0.0
    expected = case.decode(reference, torch.arange(rows), slots)
    idle = [slot for slot in range(rows + 3) if slot not in slots]
    case.conv[idle] = case.state[idle] = float("nan")
    out, conv, state = decode(fence(case), slots)
    assert_close(out, expected[0])
    assert_all_close((conv[slots], state[slots]), (expected[1][slots], expected[2][slots]))
    assert bool(conv[idle].isnan().all()) and bool(state[idle].isnan().all())


@triton.jit
def gate_kernel(x, out, rate, lower_bound, BOUNDED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, log_decay(tl.load(x + at), rate, lower_bound, BOUNDED))


@pytest.mark.parametrize("gate", GATES)
def test_gate(gate: str) -> None:
    """To the last bits over its whole range: nothing overflows, and no small log-decay is lost."""
    x = torch.cat((torch.linspace(-80, 80, 500), torch.tensor([-3e38, -1e4, -0.0, 0, 1e4, 3e37])))
    x = torch.cat((x, torch.linspace(-17.5, -15.5, 6)))  # where log(1 + e) alone has one bit left
    out, rate, bound = torch.empty(512), 0.5, GATES[gate]  # 0.5 x rounds nothing
    launch(gate_kernel, (1,), x, out, rate, bound or 0.0, BOUNDED=bound is not None, BLOCK=512)
    expected = reference.kda_gate(
        x.double().view(512, 1, 1), torch.tensor([rate]).log().double(), torch.zeros(1, 1), bound
    ).flatten()
    assert out.isfinite().all() and (out <= 0).all()
    small = expected.abs() < 1e-36  # below: subnormal
    torch.testing.assert_close(out[~small].double(), expected[~small], rtol=2e-6, atol=0.0)
    assert (out[small].abs() < 2e-36).all()


@pytest.mark.parametrize("steep", [-1e4, 1e4])
@pytest.mark.parametrize("gate", GATES)
def test_decode_with_gates_at_their_ends(gate: str, steep: float) -> None:
    case = make_case(2, 1, 16, 2, GATES[gate])
    case.z.fill_(steep)
    slots = torch.tensor([1, 0])
    expected = case.decode(reference, torch.arange(2), slots)
    assert_all_close(decode(fence(case), slots), expected)


def test_decode_of_padded_rows() -> None:
    """Slot -1: a zero row, whatever its inputs, and no state is touched."""
    case = make_case(5, 2, 16, 3, -5.0)
    slots = torch.tensor([2, -1, 0, -1, -1])
    expected = case.decode(reference, torch.arange(5), slots)
    for x in (case.qkv, case.z, case.beta):
        x[slots < 0] = float("nan")
    out, conv, state = decode(fence(case), slots)
    assert bool((out[slots < 0] == 0).all())
    assert_all_close((out, conv, state), expected)


def test_numbers_that_lie_apart() -> None:
    case = make_case(3, 2, 16, 3, -5.0)
    apart = fence(case)
    apart.qkv, apart.z, apart.beta = spread(case.qkv, 1), spread(case.z, 1), spread(case.beta, 1)
    slots = spread(torch.tensor([2, 0, 1]))
    assert_all_close(decode(apart, slots), case.decode(reference, torch.arange(3), slots))
    apart.conv, apart.state = fenced(case.conv), fenced(case.state)
    spans = [(1, 0, 3, 0)]
    assert_all_close(prefill(apart, spans), case.prefill(reference, spans))


def test_decode_rows_do_not_depend_on_companions() -> None:
    case = make_case(5, 1, 16, 5, None)
    whole = case.decode(triton_ops, torch.arange(5), torch.arange(5))
    for chosen in ([3], [4, 0, 2]):
        rows = torch.tensor(chosen)
        out, conv, state = case.decode(triton_ops, rows, rows)
        assert_same((out, conv[rows], state[rows]), tuple(x[rows] for x in whole))


@triton.jit
def operand_kernel(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, operand(tl.load(x + at), "tf32"))


def test_operands_are_rounded_to_nearest_and_stay_nan() -> None:
    ulp = 2.0**-10
    numbers = [1 + ulp * 0.49, 1 + ulp * 0.51, -1 - ulp * 0.51, 0.0, 3e38, float("inf")]
    x, out = torch.tensor([*numbers, *[float("nan")] * 2]), torch.empty(8)
    x.view(torch.int32)[-2:] = torch.tensor([0x7FFFFFFF, -1])  # as GPUs make them
    launch(operand_kernel, (1,), x, out, BLOCK=8)
    assert out[:4].tolist() == [1.0, 1 + ulp, -1 - ulp, 0.0]
    assert abs(float(out[4]) / 3e38 - 1) <= ulp / 2 and float(out[5]) == float("inf")
    assert out[6:].isnan().all()


def prefill(case: Case, spans: list[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """In place, and nothing beside the pools may change."""
    out = triton_ops.kda_prefill(
        case.qkv, case.z, case.beta, *case.weights, case.conv, case.state, spans
    )
    assert_fence(case.conv)
    assert_fence(case.state)
    return out, case.conv, case.state


def poison_outside(case: Case, spans: list[Span]) -> Tensor:
    """NaN in every row and slot of no span; returns which rows those are."""
    outside = torch.ones(len(case.qkv), dtype=torch.bool)
    for _, begin, end, _ in spans:
        outside[begin:end] = False
    idle = [slot for slot in range(len(case.state)) if slot not in {span[0] for span in spans}]
    for x in (case.qkv, case.z, case.beta):
        x[outside] = float("nan")
    case.conv[idle] = case.state[idle] = float("nan")
    return outside


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "width", "gate"),
    [
        ([1, 15, 16, 17, 63, 64, 65, 130], 1, 16, 4, "softplus"),
        ([2, 0, 20], 3, 60, 3, "bounded"),
        ([3, 70], 1, 32, 2, "softplus"),
        ([20], 1, 128, 4, "bounded"),
        ([5], 2, 7, 4, "bounded"),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_prefill(lengths: list[int], heads: int, dim: int, width: int, gate: str) -> None:
    """Ragged spans at several positions, rows of nobody before, between and behind them."""
    tokens = sum(lengths) + 2 * (len(lengths) + 1)
    case = make_case(tokens, heads, dim, len(lengths) + 2, GATES[gate], 7, width, sharpness=3.0)
    spans, row = [], 2
    for number, length in enumerate(lengths):
        spans.append((number + 1, row, row + length, 37 * number))
        row += length + 2
    expected = case.prefill(reference, spans)
    outside = poison_outside(case, spans)
    out, conv, state = prefill(fence(case), spans)
    assert_close(out, expected[0])
    assert bool((out[outside] == 0).all())
    assert_all_close((conv[1:-1], state[1:-1]), (expected[1][1:-1], expected[2][1:-1]))
    assert bool(conv[[0, -1]].isnan().all()) and bool(state[[0, -1]].isnan().all())


@pytest.mark.parametrize("position", [60, 61, 62, 63])
def test_prefill_reads_the_window_over_a_short_first_chunk(position: int) -> None:
    """The grid leaves the first chunk one to four rows; the taps of the second reach over it."""
    case = make_case(6, 1, 16, 2, -5.0)
    spans = [(1, 0, 6, position)]
    expected = case.prefill(reference, spans)
    assert_all_close(prefill(fence(case), spans), expected)


def test_prefill_of_no_rows() -> None:
    case = make_case(3, 1, 16, 2, -5.0)
    kept = case.conv.clone(), case.state.clone()
    for spans in ([], [(1, 1, 1, 5)]):
        out, conv, state = prefill(fence(case), spans)
        assert_same((out, conv, state), (torch.zeros(3, 1, 16), *kept))


@pytest.mark.parametrize(("tokens", "start", "cuts"), [(70, 128, [64]), (100, 40, [24, 88])])
def test_prefill_cut_at_the_grid_is_bit_identical(tokens: int, start: int, cuts: list[int]) -> None:
    case = make_case(tokens, 1, 16, 2, -5.0)
    whole = case.prefill(triton_ops, [(1, 0, tokens, start)])
    assert_same(run_cut(triton_ops, case, cuts, start), whole)


def test_prefill_spans_do_not_depend_on_companions() -> None:
    case = make_case(24, 1, 16, 4, -5.0)
    spans = [(3, 0, 13, 64), (0, 13, 14, 7), (1, 18, 24, 60)]
    whole = case.prefill(triton_ops, spans)
    for span in spans:
        out, conv, state = case.prefill(triton_ops, [span])
        slot, rows = span[0], slice(span[1], span[2])
        assert_same(
            (out[rows], conv[slot], state[slot]),
            (whole[0][rows], whole[1][slot], whole[2][slot]),
        )


@pytest.mark.parametrize("steep", [30.0, 1e4])
def test_prefill_keeps_small_decays_beside_huge_ones(steep: float) -> None:
    """Differences of running sums would lose the small log-decays behind a huge one."""
    case = make_case(64, 1, 16, 1, None)
    case.z[:] = -7.0 - case.weights[2]
    case.z[5:37] = steep
    case.z[20] = -1e4  # no decay at all, exactly
    expected = case.prefill(reference, [(0, 0, 64, 0)])
    assert_all_close(prefill(fence(case), [(0, 0, 64, 0)]), expected, 2e-6)


def test_prefill_with_identical_keys() -> None:
    """beta near 1, no decay and one key for all rows: the worst triangular system."""
    case = make_case(64, 1, 16, 1, -5.0)
    case.qkv[:, 16:32] = case.qkv[0, 16:32].clone()
    case.conv[:, :, 16:32] = case.qkv[0, 16:32]
    case.z.fill_(-1e4)
    case.beta.fill_(30.0)
    expected = case.prefill(reference, [(0, 0, 64, 0)])
    assert_all_close(prefill(fence(case), [(0, 0, 64, 0)]), expected)


def test_prefill_then_decode_equals_prefill() -> None:
    """In pools whose slots lie apart."""
    case = make_case(24, 1, 16, 3, -5.0)
    whole = case.prefill(triton_ops, [(2, 0, 24, 0)])
    pools = spread(case.conv), spread(case.state)
    head = (x[:21] for x in (case.qkv, case.z, case.beta))
    outs = [triton_ops.kda_prefill(*head, *case.weights, *pools, [(2, 0, 21, 0)])]
    for t in range(21, 24):
        row = (x[t : t + 1] for x in (case.qkv, case.z, case.beta))
        outs.append(triton_ops.kda_decode(*row, *case.weights, *pools, torch.tensor([2])))
    assert_all_close((torch.cat(outs), *pools), whole)


def test_bf16_activations() -> None:
    """Decode rounds once, after the convolution, as the equations do; prefill's operands are TF32,
    which is an eighth of that."""
    case = in_bf16(make_case(21, 1, 32, 2, -5.0))
    slots, pair = torch.tensor([1, 0]), torch.arange(2)
    expected = case.decode(reference, pair, slots)
    two = Case(case.qkv[:2], case.z[:2], case.beta[:2], case.weights, case.conv, case.state)
    assert_all_close(decode(fence(two), slots), expected)
    spans = [(1, 0, 21, 40)]
    exact = case.prefill(reference, spans)
    out, conv, state = prefill(fence(case), spans)
    assert torch.equal(conv, exact[1])
    for got, wanted in ((out, exact[0]), (state[1], exact[2][1])):
        assert float((got - wanted).norm()) < 2**-10 * float(wanted.norm())
        assert_close(got, wanted, 2**-9)
