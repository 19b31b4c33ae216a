"""Kernels of flash-linear-attention (fla-core, where it is installed) at the same sizes.

Theirs get what ours computes beside the recurrence for free: the short convolution is left out, the
projections arrive as separate tensors. `ours` of a row names the case to compare with.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cases import (
    ATTN_RES_SOURCES,
    DECODE_ROWS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    PREFILL_ROWS,
    Make,
)
from tests.bench.gpu.inputs import DeviceMake
from tests.bench.gpu.pool import NO_GRAPH
from tests.bench.gpu.timers import Timer

GATE_BOUND = -5.0
BUFFERS = 3


def items() -> list[str]:
    """None where fla is not installed."""
    return list(_PEERS) if find_spec("fla") else []


def time_peer(item: str, device: torch.device, timer: Timer) -> dict[str, Any]:
    ours, build = _PEERS[item]
    with torch.inference_mode():
        calls = [build(DeviceMake(device, seed)) for seed in range(BUFFERS)]
        times: dict[str, Any] = {"ours": ours, "call": timer.calls_us(calls)}
        try:
            times["graph"] = timer.graph_us(calls)
        except RuntimeError as error:
            times[NO_GRAPH] = str(error).splitlines()[0]
    return times


def _kda_inputs(make: Make, rows: int, tokens: int) -> dict[str, Any]:
    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return make.randn(rows, tokens, *shape, dtype=dtype)

    return {
        "q": drawn(HEADS, HEAD_DIM),
        "k": drawn(HEADS, HEAD_DIM),
        "v": drawn(HEADS, HEAD_DIM),
        "g": drawn(HEADS, HEAD_DIM),
        "beta": drawn(HEADS),
        "A_log": make.randn(HEADS, dtype=torch.float32, scale=0.5),
        "dt_bias": make.randn(HEADS * HEAD_DIM, dtype=torch.float32),
        "initial_state": make.randn(
            rows, HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32, scale=0.1
        ),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "lower_bound": GATE_BOUND,
    }


def _recurrent(make: Make) -> Callable[[], Any]:
    from fla.ops.kda import fused_recurrent_kda

    return partial(fused_recurrent_kda, **_kda_inputs(make, DECODE_ROWS, 1))


def _chunked(make: Make) -> Callable[[], Any]:
    from fla.ops.kda import chunk_kda

    return partial(chunk_kda, **_kda_inputs(make, 1, PREFILL_ROWS), safe_gate=True)


def _attn_res(rows: int) -> Callable[[Make], Callable[[], Any]]:
    def build(make: Make) -> Callable[[], Any]:
        from fla.ops.attnres import fused_attnres

        sources = [make.randn(rows, HIDDEN) for _ in range(ATTN_RES_SOURCES)]
        query = make.randn(HIDDEN, scale=HIDDEN**-0.5)
        return partial(fused_attnres, query, sources, make.randn(HIDDEN), make.randn(HIDDEN))

    return build


# What it is -> (operator and phase of ours, inputs -> the call).
_PEERS: dict[str, tuple[str, Callable[[Make], Callable[[], Any]]]] = {
    "fla fused_recurrent_kda": ("kda_decode/decode", _recurrent),
    "fla chunk_kda": ("kda_prefill/prefill", _chunked),
    "fla fused_attnres, decode": ("attn_res_mix_norm/decode", _attn_res(DECODE_ROWS)),
    "fla fused_attnres, prefill": ("attn_res_mix_norm/prefill", _attn_res(PREFILL_ROWS)),
}
