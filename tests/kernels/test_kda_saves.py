"""Copies of a state in the middle of a prompt: what a prefill that ends there would have left."""

from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.kernels.kda import reference, torch_ops, triton_ops
from expertmesh.kernels.kda.types import KdaSave
from tests.kernels.checks import assert_close
from tests.kernels.test_kda import Case, make_case

# Slot 2 from position 20 on, cut at 64 and 128; slot 0 from 0 on, cut at 64; slot 1 in one piece.
PIECES = [(2, 0, 44, 20), (0, 112, 176, 0), (2, 44, 108, 64), (0, 176, 180, 64), (1, 108, 112, 9),
          (2, 180, 187, 128)]  # fmt: skip
SAVED = (0, 2, 1)  # after which pieces


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(187, 2, 16, 4, -5.0)


def run(case: Case, ops: Any, pieces: Any, saves: Any = ()) -> tuple[Tensor, Tensor, Tensor]:
    conv, state = case.conv.clone(), case.state.clone()
    out = ops.kda_prefill(case.qkv, case.z, case.beta, *case.weights, conv, state, pieces, saves)
    return out, conv, state


@pytest.mark.parametrize("ops", [reference, torch_ops, triton_ops], ids=["eq", "torch", "triton"])
def test_copies_are_states_of_shorter_prefills(case: Case, ops: Any) -> None:
    saves = [
        KdaSave(after, torch.full_like(case.conv[0], torch.nan),
                torch.full_like(case.state[0], torch.nan))
        for after in SAVED
    ]  # fmt: skip
    got = run(case, ops, PIECES, saves)
    for x, y in zip(got, run(case, reference, PIECES), strict=True):
        assert_close(x, y)
    for save in saves:
        slot = PIECES[save.after][0]
        shorter = [p for p in PIECES[: save.after + 1] if p[0] == slot]
        _, conv, state = run(case, ops, shorter)
        assert torch.equal(save.conv, conv[slot]) and torch.equal(save.state, state[slot])


def test_saving_and_its_cuts_change_no_bit(case: Case) -> None:
    saves = [KdaSave(n, torch.empty_like(case.conv[0]), torch.empty_like(case.state[0]))
             for n in SAVED]  # fmt: skip
    # Of slot 0 one piece; slot 2's rows lie apart, so its cuts stay.
    whole = [PIECES[0], (0, 112, 180, 0), PIECES[2], PIECES[4], PIECES[5]]
    for x, y in zip(run(case, torch_ops, PIECES, saves), run(case, torch_ops, whole), strict=True):
        assert torch.equal(x, y)
