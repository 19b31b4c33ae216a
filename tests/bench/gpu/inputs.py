"""Inputs drawn where they are used, and the same operators at sizes that no block divides."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cases import Make
from expertmesh.kernels.kda.types import KdaSpan
from expertmesh.kernels.latent_moe.tables import ExpertTable, expert_table
from expertmesh.kernels.latent_moe.types import Glu
from expertmesh.kernels.mla.types import MlaSpan
from expertmesh.kernels.quant.torch_ops import mxfp4_decode

Args = tuple[Any, ...]
PAGE = 64


class DeviceMake(Make):
    """A `Make` that draws on its device: a hundred times as fast there as on the host."""

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        super().__init__(device, seed)
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.mul_(scale).to(dtype)

    def ints(self, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(
            high, shape, generator=self._generator, device=self.device, dtype=dtype
        )


class OddExperts:
    """A few small experts of one layer; number 1 is not held. Packed, or dense in `dtype`."""

    def __init__(
        self, make: Make, experts: int, latent: int, inner: int, dtype: torch.dtype, packed: bool
    ) -> None:
        self._held: dict[int, Any] = {}
        self._sizes = experts, inner, make.device
        self._dtype = dtype
        for expert in range(experts):
            if expert != 1:
                shapes = (inner, latent), (latent, inner), (inner, latent)
                self._held[expert] = tuple(
                    (
                        make.ints(256, rows, columns // 2, dtype=torch.uint8),
                        make.ints(3, rows, columns // 32, dtype=torch.uint8) + 121,
                    )
                    if packed
                    else make.randn(rows, columns, dtype=dtype, scale=columns**-0.5)
                    for rows, columns in shapes
                )

    def __call__(self, expert: int) -> tuple[Tensor, Tensor]:
        w1, w2, w3 = (
            mxfp4_decode(m[0].cpu(), m[1].cpu(), self._dtype).to(m[0].device)
            if isinstance(m, tuple)
            else m
            for m in self._held[expert]
        )
        return torch.cat((w1, w3)), w2

    def table(self) -> ExpertTable:
        return expert_table(self._held, *self._sizes)


def _spread(wide: Tensor, width: int) -> Tensor:
    """The first columns of wider rows: a layer's projection is cut like that."""
    return wide[:, :width]


def _norm(make: Make, dtype: torch.dtype) -> Args:
    return make.randn(5, 1025, dtype=dtype)[:, :1001], make.randn(1001, dtype=dtype), 1e-6


def _gated_norm(make: Make, dtype: torch.dtype) -> Args:
    x = make.randn(3, 5, 72, dtype=torch.float32)
    return x, make.randn(72, dtype=torch.float32), make.randn(3, 5, 72, dtype=dtype), 1e-5


def _sources(count: int, norm: bool) -> Callable[[Make, torch.dtype], Args]:
    def arguments(make: Make, dtype: torch.dtype) -> Args:
        sources = make.randn(count, 5, 776, dtype=dtype)
        weights = make.randn(776, dtype=torch.float32, scale=0.05), make.randn(776, dtype=dtype)
        return sources, *weights[: 1 + norm]

    return arguments


def _kda(make: Make, rows: int, heads: int, dtype: torch.dtype, bound: float | None) -> Args:
    dim, taps, slots = 128, 4, 7
    channels = 3 * heads * dim
    wide = make.randn(rows, channels + heads * dim + heads + 8, dtype=dtype)
    return (
        _spread(wide, channels),
        make.randn(rows, heads, dim, dtype=dtype),
        wide[:, channels + heads * dim :][:, :heads],
        make.randn(taps, channels, dtype=torch.float32, scale=0.5).t(),
        make.randn(heads, dtype=torch.float32, scale=0.5),
        make.randn(heads, dim, dtype=torch.float32),
        bound,
        make.randn(slots, taps - 1, channels, dtype=dtype),
        make.randn(slots, heads, dim, dim, dtype=torch.float32, scale=0.1),
    )


def _kda_decode(bound: float | None) -> Callable[[Make, torch.dtype], Args]:
    def arguments(make: Make, dtype: torch.dtype) -> Args:
        return *_kda(make, 4, 3, dtype, bound), make.of([5, -1, 0, 3])

    return arguments


def _kda_prefill(bound: float | None) -> Callable[[Make, torch.dtype], Args]:
    def arguments(make: Make, dtype: torch.dtype) -> Args:
        spans = [KdaSpan(2, 0, 30, 41), KdaSpan(6, 30, 31, 0), KdaSpan(1, 33, 81, 128)]
        return *_kda(make, 83, 1, dtype, bound), spans

    return arguments


def _mla_decode(make: Make, dtype: torch.dtype) -> Args:
    heads, rank, rope, pages = 5, 512, 64, 9
    cache = make.randn(pages * PAGE, rank + rope, dtype=dtype)
    table = make.of([[3, 0, 0], [7, 1, 4], [2, 2, 2], [8, 5, 6]])
    query = make.randn(heads, 4, rank, dtype=dtype).transpose(0, 1)
    lengths = make.of([1, 129, 0, 192])
    return query, make.randn(4, heads, rope, dtype=dtype), cache, table, lengths, 192**-0.5, None


def _mla_prefill(make: Make, dtype: torch.dtype) -> Args:
    heads, rank, rope, nope, value, pages = 3, 64, 16, 32, 32, 5
    spans = [
        MlaSpan(0, 3, 66, make.of([3, 1])),
        MlaSpan(3, 70, 0, make.of([2, 4]), PAGE),
    ]
    return (
        make.randn(70, heads, nope, dtype=dtype),
        make.randn(70, heads, rope, dtype=dtype),
        make.randn(pages * PAGE, rank + rope, dtype=dtype),
        make.randn(heads, nope, rank, dtype=dtype, scale=0.1),
        make.randn(heads, value, rank, dtype=dtype, scale=0.1),
        spans,
        (nope + rope) ** -0.5,
    )


def _output_gate(make: Make, dtype: torch.dtype) -> Args:
    return make.randn(3, 321, dtype=dtype), _spread(make.randn(3, 400, dtype=dtype), 321)


def _route(make: Make, _: torch.dtype) -> Args:
    return make.randn(5, 77, dtype=torch.float32), make.randn(77, dtype=torch.float32), 7, True, 2.5


def _glu(spec: Glu) -> Callable[[Make, torch.dtype], Args]:
    return lambda make, dtype: (make.randn(3, 2 * 333, dtype=dtype, scale=3.0), spec)


SITU = Glu("situ", beta=4.0, linear_beta=25.0)


def _experts(packed: bool) -> Callable[[Make, torch.dtype], Args]:
    def arguments(make: Make, dtype: torch.dtype) -> Args:
        z = make.randn(7, 96, dtype=dtype)
        ids = make.of(
            [[0, 2, -1], [3, 0, 2], [-1, -1, -1], [2, -1, 3], [0, 3, 4], [4, 2, 0], [-1, 2, -1]]
        )
        weights = make.randn(7, 3, dtype=torch.float32).abs_()
        return z, ids, weights, OddExperts(make, 5, 96, 64, dtype, packed), SITU

    return arguments


def _mxfp4(make: Make, dtype: torch.dtype) -> Args:
    packed = make.ints(256, 37, 48, dtype=torch.uint8)
    return packed, make.ints(256, 37, 3, dtype=torch.uint8), dtype


def _fp8_encode(make: Make, dtype: torch.dtype) -> Args:
    x = make.randn(5, 300, dtype=dtype, scale=50.0)
    x[3] = 0.0
    return (x,)


def _fp8_decode(make: Make, dtype: torch.dtype) -> Args:
    return (
        make.ints(127, 5, 300, dtype=torch.uint8),
        make.randn(5, 1, dtype=torch.float32),
        dtype,
    )


def _sample(make: Make, dtype: torch.dtype) -> Args:
    settings = [  # temperature, top_k, top_p, min_p, uniform
        (0.0, 0, 1.0, 0.0, 0.3),
        (1.0, 0, 1.0, 0.0, 0.6),
        (0.7, 5, 1.0, 0.0, 0.99),
        (1.3, 0, 0.8, 0.0, 0.5),
        (0.9, 40, 0.95, 0.05, 0.01),
    ]
    temperature, top_k, top_p, min_p, uniform = zip(*settings, strict=True)
    return (
        make.randn(5, 1003, dtype=dtype, scale=2.0),
        make.of(list(temperature), torch.float32),
        make.of(list(top_k)),
        make.of(list(top_p), torch.float32),
        make.of(list(min_p), torch.float32),
        make.of(list(uniform), torch.float64),
    )


# Operator -> what it is called with: label, builder. Every one in float32 and in bfloat16.
ODD: dict[str, dict[str, Callable[[Make, torch.dtype], Args]]] = {
    "rms_norm": {"strided": _norm},
    "gated_rms_norm": {"72 wide": _gated_norm},
    "attn_res_mix": {"2 sources": _sources(2, False), "7 sources": _sources(7, False)},
    "attn_res_mix_norm": {"1 source": _sources(1, True), "7 sources": _sources(7, True)},
    "kda_decode": {"bounded gate": _kda_decode(-5.0), "softplus gate": _kda_decode(None)},
    "kda_prefill": {"bounded gate": _kda_prefill(-5.0), "softplus gate": _kda_prefill(None)},
    "mla_decode": {"ragged": _mla_decode},
    "mla_prefill": {"two spans": _mla_prefill},
    "output_gate": {"strided": _output_gate},
    "route": {"77 experts": _route},
    "glu": {"situ": _glu(SITU), "silu": _glu(Glu("silu"))},
    "experts_partial_sum": {"packed": _experts(True), "dense": _experts(False)},
    "mxfp4_decode": {"37 rows": _mxfp4},
    "fp8_encode": {"a zero row": _fp8_encode},
    "fp8_decode": {"5 rows": _fp8_decode},
    "sample": {"all filters": _sample},
}
