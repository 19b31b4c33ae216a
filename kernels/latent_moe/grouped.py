"""Products of groups of rows with a matrix each, on a CPU: by two threads where there is enough."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from expertmesh.kernels.linear.half import HalfMatrix

# Weights read by all products: 0.2 ms of work, several times what it takes to hand over half of it.
WORTH_BYTES = 2 << 20


def multiply_all(
    x_RK: Tensor, weights: Sequence[Tensor | HalfMatrix], sizes: list[int], out_RN: Tensor
) -> None:
    """Writes x Wᵀ of each group to `out_RN`; sizes: rows of each group, all R together.

    A product in float16 weights uses one thread. The calls release the interpreter's lock, so a
    second thread takes half of the groups where torch may use two. Who computes a group reaches no
    bit of it.
    """
    split = torch.split_with_sizes  # Tensor.split takes twice as long to get here
    groups = list(zip(split(x_RK, sizes), weights, split(out_RN, sizes), strict=True))
    if (
        torch.get_num_threads() < 2
        or not all(isinstance(weight, HalfMatrix) for weight in weights)
        or sum(weight.nbytes for weight in weights) < WORTH_BYTES
    ):
        _multiply(groups)
        return
    half = len(groups) // 2
    other = _helper().submit(_aside, groups[half:], torch.is_inference_mode_enabled())
    try:
        _multiply(groups[:half])
    finally:
        other.result()


def _multiply(groups: Sequence[tuple[Tensor, Tensor | HalfMatrix, Tensor]]) -> None:
    for x_RK, weight_NK, out_RN in groups:
        if isinstance(weight_NK, HalfMatrix):
            weight_NK.into(x_RK, out_RN)
        else:
            torch.mm(x_RK, weight_NK.t().to(x_RK.dtype), out=out_RN)


def _aside(groups: Sequence[tuple[Tensor, Tensor | HalfMatrix, Tensor]], inference: bool) -> None:
    with torch.inference_mode(inference):  # a thread's own
        _multiply(groups)


@cache
def _helper() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="experts")
