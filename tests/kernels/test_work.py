"""Floors on paper: the bytes of a case are those of the tensors that its launches are given."""

import pytest
import torch

from expertmesh.kernels.attn_res import cases as attn_res
from expertmesh.kernels.attn_res import triton_ops as attn_res_ops
from expertmesh.kernels.cases import Case, Make
from expertmesh.kernels.launch import recording
from expertmesh.kernels.norm import cases as norm
from expertmesh.kernels.norm import triton_ops as norm_ops
from expertmesh.kernels.quant import cases as quant
from expertmesh.kernels.quant import triton_ops as quant_ops

# Operators that read every operand whole.
WHOLE = [
    (ops, case)
    for ops, cases in ((attn_res_ops, attn_res), (norm_ops, norm), (quant_ops, quant))
    for case in cases.CASES
]


@pytest.mark.parametrize(("ops", "case"), WHOLE, ids=[case.name for _, case in WHOLE])
def test_bytes_are_those_of_the_launch(ops: object, case: Case) -> None:
    with recording() as launches:
        getattr(ops, case.operator)(*case.arguments(Make()))
    (launch,) = launches
    tensors = [one for one in launch.arguments if isinstance(one, torch.Tensor)]
    assert case.work.bytes == sum(one.nbytes for one in tensors)
