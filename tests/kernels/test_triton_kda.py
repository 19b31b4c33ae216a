"""The Triton kernels in the interpreter, against the equations."""

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.kda import reference, triton_ops
from tests.kernels.checks import assert_close
from tests.kernels.test_kda import GATES, Case, assert_all_close, assert_same, make_case
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


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "width"), [(3, 3, 16, 4), (2, 2, 60, 3), (1, 1, 128, 4), (4, 1, 7, 2)]
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


@pytest.mark.parametrize("steep", [-1e4, -30.0, 30.0, 1e4])
@pytest.mark.parametrize("gate", GATES)
def test_decode_with_gates_at_their_ends(gate: str, steep: float) -> None:
    """No overflow, and a decay of almost nothing is not lost: softplus(-30) is 9e-14."""
    case = make_case(2, 2, 16, 2, GATES[gate])
    case.z.fill_(steep)
    slots = torch.tensor([1, 0])
    expected = case.decode(reference, torch.arange(2), slots)
    assert_all_close(decode(fence(case), slots), expected)


def test_decode_of_padded_rows() -> None:
    """Slot -1: a zero row, whatever its inputs, and no state is touched."""
    case = make_case(5, 2, 16, 3, -5.0)
    slots = torch.tensor([2, -1, 0, -1, -1])
    rows = slots >= 0
    expected = case.decode(reference, torch.arange(5)[rows], slots[rows])
    for x in (case.qkv, case.z, case.beta):
        x[~rows] = float("nan")
    out, conv, state = decode(fence(case), slots)
    assert bool((out[~rows] == 0).all())
    assert_all_close((out[rows], conv, state), expected)


def test_decode_rows_do_not_depend_on_companions() -> None:
    case = make_case(40, 1, 16, 40, None)

    def compute(rows: Tensor) -> Tensor:
        out, _, state = case.decode(triton_ops, rows[:8], rows[:8])
        return torch.cat((out.flatten(1), state[rows[:8]].flatten(1)), dim=1)

    whole = compute(torch.arange(8))
    for chosen in ([3], [5, 2], [7, 0, 4, 1, 6]):
        assert_same(tuple(compute(torch.tensor(chosen))), tuple(whole[chosen]))
