"""Digests of an expert: of what is stored, and of the matrices that are derived from it.

Every digest covers dtype, shape and strides beside the bytes and is seeded with layer and expert:
the right bytes under another name, or read in another layout, do not pass. Of derived matrices the
numbers count: in what format and layout they are kept depends on the processor. xxh3 (64 bit) finds
accidents, not attacks. It runs at memory speed and without the interpreter's lock.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix

_IDENTITY = struct.Struct("<qq")
_PAIR = struct.Struct("<qqQQ")


class Digests(NamedTuple):
    """packed: of the weights as stored. derived: of the decoded matrices as the GEMM reads them."""

    packed: int
    derived: int

    def checksum(self, layer: int, expert: int) -> int:
        """One number for both, equal on every actor that holds this expert intact."""
        return xxhash.xxh3_64_intdigest(_PAIR.pack(layer, expert, *self))


def packed_digest(layer: int, expert: int, weights: ExpertWeights) -> int:
    return _digest(layer, expert, (tensor for _, tensor in stored_tensors(weights)))


def derived_digest(layer: int, expert: int, matrices: Iterable[Tensor]) -> int:
    """Of all numbers as float32, zeros positive, as they are read."""
    numbers = ((matrix.float() + 0.0).contiguous() for matrix in matrices)
    return _digest(layer, expert, numbers)


def stored_tensors(weights: ExpertWeights) -> list[tuple[str, Tensor]]:
    """All tensors of an expert with their names, always in the same order."""
    found = []
    for name in ("w1", "w2", "w3"):
        matrix = getattr(weights, name)
        if isinstance(matrix, PackedMatrix):
            found += [(f"{name}.packed", matrix.packed), (f"{name}.scale", matrix.scale)]
        else:
            found.append((name, matrix))
    return found


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a dense tensor in the order they lie in memory; a view on the CPU."""
    host = tensor.detach().cpu()
    if not host.is_contiguous():
        host = host.t()  # laid out transposed; the strides tell that apart
    assert host.is_contiguous(), "experts are kept dense"
    return host.view(-1).view(torch.uint8).numpy()


def _digest(layer: int, expert: int, tensors: Iterable[Tensor]) -> int:
    state = xxhash.xxh3_64(_IDENTITY.pack(layer, expert))
    for tensor in tensors:
        layout = (str(tensor.dtype), tuple(tensor.shape), tensor.stride())
        state.update(repr(layout).encode())
        state.update(bytes_of(tensor).data)
    return state.intdigest()
