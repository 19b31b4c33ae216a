"""Torch's kernels with padded decode rows, which Triton's have by themselves: see `padded`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from expertmesh.kernels.registry import Kernels, load_kernels

Wrap = Callable[[Callable[..., Tensor]], Callable[..., Tensor]]


def padded(kernels: Kernels, wrap: Wrap) -> Kernels:
    """A row without a slot, or without context, is left out; its result is zero. Padding comes
    last. wrap: around the kernels that ask the host."""

    def kda_decode(qkv: Tensor, z: Tensor, beta: Tensor, *rest: Any) -> Tensor:
        *constants, slots = rest
        rows = int((slots >= 0).sum())
        out = z.new_zeros(z.shape)
        if rows:
            parts = (qkv[:rows], z[:rows], beta[:rows], *constants, slots[:rows])
            out[:rows] = kernels.kda_decode(*parts)
        return out

    def mla_decode(
        q: Tensor, rope: Tensor, cache: Tensor, table: Tensor, lengths: Tensor, *rest: Any
    ) -> Tensor:
        rows = int((lengths > 0).sum())
        out = q.new_zeros(q.shape)
        if rows:
            parts = (q[:rows], rope[:rows], cache, table[:rows], lengths[:rows], rest[0], None)
            out[:rows] = kernels.mla_decode(*parts)
        return out

    return replace(
        kernels,
        kda_decode=wrap(kda_decode),
        mla_decode=wrap(mla_decode),
        mla_plan=lambda table, lengths: None,
    )


def padded_torch(wrap: Wrap) -> Kernels:
    return padded(load_kernels("torch"), wrap)
