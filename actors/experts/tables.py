"""The experts of a layer as kernels read them: by address, from device memory, while some move."""

import threading
from collections.abc import Iterable
from typing import Any

import torch

from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.kernels.latent_moe.tables import ExpertTable, Matrices, Matrix, expert_table
from expertmesh.kernels.registry import Kernels


class LayerTables:
    """One table per layer, made when somebody asks and again after an expert came or went.

    A step that has taken a table keeps the experts in it alive until its kernels are queued, an
    expert that is dropped meanwhile included. What runs after that, in the order of the stream, is
    the allocator's to know: it is told of each stream that reads a table, and hands memory out
    again only behind the last kernel there.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        experts: int,
        inner: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kernels = kernels
        self._experts, self._inner = experts, inner
        self._dtype, self._device = dtype, device
        self._lock = threading.Lock()
        self._made: dict[int, ExpertTable] = {}  # guarded by _lock, like _streams
        self._streams: dict[int, list[Any]] = {}  # layer -> that the allocator knows of

    @property
    def in_use(self) -> bool:
        """Whether kernels read tables here; decoded copies help nobody then."""
        return bool(self._made)

    def get(self, layer: int) -> ExpertTable | None:
        """None where it has to be made."""
        with self._lock:
            table = self._made.get(layer)
            if table is not None:
                self._tell_allocator(layer, table)
            return table

    def make(self, layer: int, held: Iterable[tuple[int, ExpertWeights]]) -> ExpertTable:
        """held: what the layer holds, with nobody adding or dropping meanwhile."""
        matrices = {expert: self._matrices(weights) for expert, weights in held}
        table = expert_table(matrices, self._experts, self._inner, self._device)
        with self._lock:
            self._made[layer], self._streams[layer] = table, []
            self._tell_allocator(layer, table)
        return table

    def forget(self, layer: int) -> None:
        with self._lock:
            self._made.pop(layer, None)
            self._streams.pop(layer, None)

    def _tell_allocator(self, layer: int, table: ExpertTable) -> None:
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        if stream not in self._streams[layer]:
            for tensor in (table.slots_E, table.rows, *table.tensors):
                tensor.record_stream(stream)
            self._streams[layer].append(stream)

    def _matrices(self, weights: ExpertWeights) -> Matrices:
        """As stored, or all decoded where one expert's three are stored in different ways."""
        found = weights.w1, weights.w2, weights.w3
        if len({None if isinstance(one, PackedMatrix) else one.dtype for one in found}) == 1:
            w1, w2, w3 = map(_stored, found)
        else:
            w1, w2, w3 = map(self._dense, found)
        return w1, w2, w3

    def _dense(self, matrix: PackedMatrix | torch.Tensor) -> torch.Tensor:
        if isinstance(matrix, PackedMatrix):
            return self._kernels.mxfp4_decode(matrix.packed, matrix.scale, self._dtype)
        return matrix.to(self._dtype)


def _stored(matrix: PackedMatrix | torch.Tensor) -> Matrix:
    return (matrix.packed, matrix.scale) if isinstance(matrix, PackedMatrix) else matrix
