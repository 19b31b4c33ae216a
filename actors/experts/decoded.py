"""Decoded experts: the matrices that the GEMM reads, and a bounded cache of them."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.kernels.linear.half import HalfMatrix, to_half
from expertmesh.kernels.linear.torch_ops import lay_out
from expertmesh.kernels.registry import Kernels

Key = tuple[int, int]  # layer, expert


@dataclass(frozen=True, slots=True)
class Decoded:
    """w13: gate and up stacked, [2I, D]. w2: down, [D, I]. As the GEMM reads them."""

    w13: Tensor | HalfMatrix
    w2: Tensor | HalfMatrix

    @property
    def nbytes(self) -> int:
        return self.w13.nbytes + self.w2.nbytes

    def dense(self) -> tuple[Tensor, Tensor]:
        """Both as tensors, read out of the memory that the GEMM reads."""
        return _dense(self.w13), _dense(self.w2)


def _dense(matrix: Tensor | HalfMatrix) -> Tensor:
    return matrix if isinstance(matrix, Tensor) else matrix.dense()


def decode(kernels: Kernels, weights: ExpertWeights, dtype: torch.dtype) -> Decoded:
    """Matrices for repeated products in `dtype`; in half the memory where that is exact. The same
    bits every time."""

    def dense(matrix: PackedMatrix | Tensor) -> Tensor:
        if isinstance(matrix, PackedMatrix):
            return kernels.mxfp4_decode(matrix.packed, matrix.scale, dtype)
        return matrix.to(dtype)

    w13, w2 = torch.cat([dense(weights.w1), dense(weights.w3)]), dense(weights.w2)
    return Decoded(to_half(w13) or lay_out(w13), to_half(w2) or lay_out(w2))


class DecodedCache:
    """At most `limit` bytes, least recently used first out. Thread-safe.

    An entry is never changed once made, so a caller may go on using one that has been evicted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Key, Decoded] = OrderedDict()  # guarded by _lock, like _nbytes
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get(self, key: Key) -> Decoded | None:
        """Marks the entry as just used."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[Key]) -> list[Decoded | None]:
        """Several, one lock for all."""
        kept = self._kept
        with self._lock:
            hits = [kept.get(key) for key in keys]
            for key, hit in zip(keys, hits, strict=True):
                if hit is not None:
                    kept.move_to_end(key)
        return hits

    def peek(self, key: Key) -> Decoded | None:
        """Leaves the order alone: who inspects an entry does not use it."""
        with self._lock:
            return self._kept.get(key)

    def put(self, key: Key, made: Decoded) -> None:
        """Keeps `made` if it fits at all; an entry that is there already stays."""
        with self._lock:
            if made.nbytes > self._limit or key in self._kept:
                return
            self._kept[key] = made
            self._nbytes += made.nbytes
            while self._nbytes > self._limit:
                _, evicted = self._kept.popitem(last=False)
                self._nbytes -= evicted.nbytes

    def remove(self, key: Key) -> None:
        with self._lock:
            gone = self._kept.pop(key, None)
            if gone is not None:
                self._nbytes -= gone.nbytes
