"""One expert from one actor to another: its bytes with their digests, verified before it counts."""

import threading
import time
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.experts.digests import Digests, bytes_of, stored_tensors
from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix

_DTYPES = {str(dtype): dtype for dtype in (torch.uint8, torch.bfloat16, torch.float32)}


class TransferError(RuntimeError):
    """An expert did not arrive. The bank that asked for it is as it was before."""

    def __init__(self, layer: int, expert: int, source: str, reason: str) -> None:
        super().__init__(f"layer {layer}, expert {expert} from {source}: {reason}")
        self.layer, self.expert, self.source, self.reason = layer, expert, source, reason

    def __reduce__(self) -> tuple[type, tuple[int, int, str, str]]:
        # As for ExpertNotHeld.
        return type(self), (self.layer, self.expert, self.source, self.reason)


class ChecksumError(TransferError):
    """What arrived, or what has been here for long, is not what it should be."""


class Part(NamedTuple):
    """One stored tensor. name: as in `stored_tensors`. data: uint8, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Packet:
    """One expert on its way, with the digests that its source has had since it came in there."""

    layer: int
    expert: int
    parts: tuple[Part, ...]
    digests: Digests

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts)


class Adopted(NamedTuple):
    """nbytes: that travelled; 0 for an expert that was here already."""

    checksum: int
    nbytes: int


class Peer(Protocol):
    """Another expert actor."""

    @property
    def name(self) -> str: ...

    def give(self, layer: int, expert: int, timeout_s: float) -> Packet:
        """Raises TransferError."""
        ...


def give(bank: ExpertBank, layer: int, expert: int) -> Packet:
    """What to send. The bytes are views of the bank's memory, which never changes.

    The digests are those from when the expert came in: should the memory have gone bad since, the
    receiver finds out. Raises ExpertNotHeld.
    """
    return packet_of(layer, expert, *bank.stored(layer, expert))


def packet_of(layer: int, expert: int, weights: ExpertWeights, digests: Digests) -> Packet:
    """Views of `weights`, not copies."""
    parts = tuple(
        Part(name, str(tensor.dtype), tuple(tensor.shape), bytes_of(tensor))
        for name, tensor in stored_tensors(weights)
    )
    return Packet(layer, expert, parts, digests)


def adopt(bank: ExpertBank, layer: int, expert: int, peer: Peer, deadline: float) -> Adopted:
    """Copies an expert from `peer` into `bank`.

    deadline: on the monotonic clock. The expert is seen by nobody until its bytes and the matrices
    derived from them here have the digests that the source gives. One that is here already is
    verified in place. Raises TransferError.
    """

    def error(reason: str) -> TransferError:
        return TransferError(layer, expert, peer.name, reason)

    if bank.holds(layer, expert):
        return Adopted(_verified(bank, layer, expert, peer.name), 0)
    left = deadline - time.monotonic()
    if left <= 0:
        raise error("another transfer took all the time there was")
    packet = peer.give(layer, expert, left)
    if (packet.layer, packet.expert) != (layer, expert):
        raise error(f"layer {packet.layer}, expert {packet.expert} came instead")
    try:
        staged = bank.stage(layer, expert, unpack(packet, bank.device))
        if staged.digests != packet.digests:
            raise ChecksumError(layer, expert, peer.name, differing(staged.digests, packet.digests))
        if time.monotonic() > deadline:
            raise error("verified only after the deadline")
        bank.admit(staged)
    except TransferError:
        raise
    except (ValueError, RuntimeError) as failure:  # of another shape, out of memory, held by now
        raise error(f"could not be taken in: {failure}") from failure
    return Adopted(staged.digests.checksum(layer, expert), packet.nbytes)


def _verified(bank: ExpertBank, layer: int, expert: int, source: str) -> int:
    found, wanted = bank.digests(layer, expert), bank.stored(layer, expert)[1]
    if found != wanted:
        reason = f"held here already, but {differing(found, wanted)}"
        raise ChecksumError(layer, expert, source, reason)
    return found.checksum(layer, expert)


def unpack(packet: Packet, device: torch.device) -> ExpertWeights:
    """Own memory, as the bank keeps it. Raises ValueError for parts that make no expert."""
    found = {part.name: _tensor(part, device) for part in packet.parts}

    def matrix(name: str) -> PackedMatrix | Tensor:
        if name in found:
            return found[name]
        if f"{name}.packed" in found and f"{name}.scale" in found:
            return PackedMatrix(found[f"{name}.packed"], found[f"{name}.scale"])
        raise ValueError(f"matrix {name} is missing")

    return ExpertWeights(matrix("w1"), matrix("w2"), matrix("w3"))


def _tensor(part: Part, device: torch.device) -> Tensor:
    dtype = _DTYPES.get(part.dtype)
    if dtype is None:
        raise ValueError(f"{part.name} has dtype {part.dtype}")
    if part.data.nbytes != prod(part.shape) * dtype.itemsize:
        raise ValueError(f"{part.name}: {part.data.nbytes} bytes for {part.dtype} {part.shape}")
    flat = torch.empty(part.data.nbytes, dtype=torch.uint8)
    np.copyto(flat.numpy(), part.data)
    return flat.view(dtype).view(part.shape).to(device)


def differing(found: Digests, wanted: Digests) -> str:
    """Which of the two digests are not the wanted ones."""
    names = ("stored bytes", "decoded matrices")
    wrong = [n for n, a, b in zip(names, found, wanted, strict=True) if a != b]
    return f"checksum mismatch in its {' and '.join(wrong)}"


class Counts:
    """Transfers of one actor since its process began."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in = self._out = self._nbytes = self._failures = self._mismatches = 0

    def sent(self, nbytes: int) -> None:
        with self._lock:
            self._out += 1
            self._nbytes += nbytes

    def received(self, nbytes: int) -> None:
        with self._lock:
            self._in += nbytes > 0
            self._nbytes += nbytes

    def failed(self, error: TransferError) -> None:
        with self._lock:
            self._failures += 1
            self._mismatches += isinstance(error, ChecksumError)

    def now(self) -> dict[str, int]:
        """As the fields of ExpertStats."""
        with self._lock:
            return {
                "transfers_in": self._in,
                "transfers_out": self._out,
                "transfer_failures": self._failures,
                "checksum_failures": self._mismatches,
                "moved_bytes": self._nbytes,
            }
