"""The experts one process holds: packed in memory, decoded on the way into the GEMM."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.actors.model.config import ModelConfig
from expertmesh.kernels.latent_moe.torch_ops import Glu
from expertmesh.kernels.linear.torch_ops import lay_out
from expertmesh.kernels.registry import Kernels


class ExpertSource(Protocol):
    def stream_experts(
        self, placed: Mapping[int, Iterable[int]]
    ) -> Iterator[tuple[int, int, ExpertWeights]]:
        """(layer, expert, weights), in the order they lie on disk."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """w13: gate and up stacked, [2I, D]. w2: down, [D, I]. Compute dtype."""

    w13: Tensor
    w2: Tensor

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes


class ExpertBank:
    """Experts by (layer, local slot), with a bounded cache of decoded ones.

    A slot is the position of an expert in its layer's list. Packed experts stay packed; at most
    `cache_bytes` of decoded copies are kept, least recently used first out.
    """

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        placed: Mapping[int, Iterable[int]],
        source: ExpertSource,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        cache_bytes: int,
    ) -> None:
        self._kernels = kernels
        self._glu = glu_of(config)
        self._dtype = dtype
        self._device = torch.device(device)
        self._cache: OrderedDict[tuple[int, int], Decoded] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached = 0
        self.experts = {layer: list(ids) for layer, ids in placed.items()}
        self._stored: dict[tuple[int, int], ExpertWeights] = {}
        self._slot_of: dict[int, Tensor] = {}
        for layer, ids in self.experts.items():
            slot_of = torch.full((config.num_experts,), -1, dtype=torch.int64)
            slot_of[ids] = torch.arange(len(ids))
            self._slot_of[layer] = slot_of.to(self._device)
        slots = {(i, e): slot for i, ids in self.experts.items() for slot, e in enumerate(ids)}
        for layer, expert, weights in source.stream_experts(self.experts):
            self._stored[layer, slots[layer, expert]] = _own(weights, self._device)

    @property
    def packed_bytes(self) -> int:
        return sum(_nbytes(matrix) for e in self._stored.values() for matrix in (e.w1, e.w2, e.w3))

    @property
    def cached_bytes(self) -> int:
        return self._cached

    def local_slots(self, layer: int, ids_TK: Tensor) -> Tensor:
        """Global expert ids to local slots, -1 for experts that live elsewhere."""
        return self._slot_of[layer][ids_TK]

    def weights(self, layer: int, slot: int) -> tuple[Tensor, Tensor]:
        """Decoded (w13 [2I, D], w2 [D, I]) of one expert."""
        key = (layer, slot)
        hit = self._cache.get(key)
        if hit is not None:
            self._cache.move_to_end(key)
            return hit.w13, hit.w2
        made = self._decode(self._stored[key])
        if made.nbytes <= self._cache_bytes:
            self._cache[key] = made
            self._cached += made.nbytes
            while self._cached > self._cache_bytes:
                _, evicted = self._cache.popitem(last=False)
                self._cached -= evicted.nbytes
        return made.w13, made.w2

    def partial_sum(self, layer: int, z_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Weighted sum over the experts held here, fp32 [T, D]; zero rows where there are none."""
        return self._kernels.experts_partial_sum(
            z_TD, slots_TK, weights_TK, lambda slot: self.weights(layer, slot), self._glu
        )

    def _decode(self, expert: ExpertWeights) -> Decoded:
        def dense(matrix: PackedMatrix | Tensor) -> Tensor:
            if isinstance(matrix, PackedMatrix):
                return self._kernels.mxfp4_decode(matrix.packed, matrix.scale, self._dtype)
            return matrix.to(self._dtype)

        w13 = torch.cat([dense(expert.w1), dense(expert.w3)])
        return Decoded(lay_out(w13), lay_out(dense(expert.w2)))


def glu_of(config: ModelConfig) -> Glu:
    return Glu(config.glu_kind, config.situ_beta, config.situ_linear_beta)


def _own(expert: ExpertWeights, device: torch.device) -> ExpertWeights:
    """Copies out of the memory map: a serving process must not wait on a disk page."""

    def move(matrix: PackedMatrix | Tensor) -> PackedMatrix | Tensor:
        if isinstance(matrix, PackedMatrix):
            packed = matrix.packed.to(device, copy=True)
            return PackedMatrix(packed, matrix.scale.to(device, copy=True))
        return matrix.to(device, copy=True)

    return ExpertWeights(move(expert.w1), move(expert.w2), move(expert.w3))


def _nbytes(matrix: PackedMatrix | Tensor) -> int:
    if isinstance(matrix, PackedMatrix):
        return matrix.packed.nbytes + matrix.scale.nbytes
    return matrix.nbytes
