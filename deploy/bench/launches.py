"""What the Triton kernels of Attention Residuals launch and move in a step, counted without a GPU.

Their launchers run on tensors that have shapes alone and are recorded instead of launched; bytes
are those of the operators' work: each operand once, whatever a cache may hold.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.model.residual import ATTN_RES_EPS
from expertmesh.kernels.attn_res.cases import attn_res_mix_norm_work, attn_res_mix_work
from expertmesh.kernels.launch import recording
from expertmesh.kernels.norm.cases import rms_norm_work
from expertmesh.kernels.work import H200, Work

DTYPE = torch.bfloat16


class Launches(msgspec.Struct, frozen=True):
    """One way, per step. floor_us: what an H200 needs at least, without the launches' own time."""

    kernels: int
    bytes_moved: int
    floor_us: float


class Counted(msgspec.Struct, frozen=True):
    fused: Launches
    unfused: Launches


def why_not() -> str:
    """Why launches cannot be counted here; empty if they can."""
    return "" if find_spec("triton") is not None else "triton is not installed"


def count_launches(sources: Sequence[int], tokens: int, width: int) -> Counted:
    """sources: how many each site of the step mixes. Needs Triton, not a GPU."""
    mix_ops: Any = import_module("expertmesh.kernels.attn_res.triton_ops")
    norm_ops: Any = import_module("expertmesh.kernels.norm.triton_ops")
    buffer_NTH = torch.empty(max(sources), tokens, width, dtype=DTYPE, device="meta")
    score_H = torch.empty(width, dtype=torch.float32, device="meta")
    norm_H = torch.empty(width, dtype=DTYPE, device="meta")
    size = DTYPE.itemsize
    fused, unfused = _Tally(), _Tally()
    for count in sources:
        v_NTH = buffer_NTH[:count]
        fused.add(
            attn_res_mix_norm_work(count, tokens, width, size, size),
            mix_ops.attn_res_mix_norm, v_NTH, score_H, norm_H, ATTN_RES_EPS, ATTN_RES_EPS,
        )  # fmt: skip
        mixed_TH = unfused.add(
            attn_res_mix_work(count, tokens, width, size),
            mix_ops.attn_res_mix, v_NTH, score_H, ATTN_RES_EPS,
        )  # fmt: skip
        unfused.add(
            rms_norm_work(tokens, width, size), norm_ops.rms_norm, mixed_TH, norm_H, ATTN_RES_EPS
        )
    return Counted(fused.total(), unfused.total())


class _Tally:
    def __init__(self) -> None:
        self._kernels = self._bytes = 0
        self._floor_us = 0.0

    def add(self, work: Work, operator: Callable[..., Tensor], *operands: object) -> Tensor:
        with recording() as launches:
            result = operator(*operands)
        self._kernels += len(launches)
        if launches:  # the mix of one source is that source
            self._bytes += work.bytes
            self._floor_us += H200.floor_us(work)
        return result

    def total(self) -> Launches:
        return Launches(self._kernels, self._bytes, self._floor_us)
