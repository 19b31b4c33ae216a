"""A packed item: one blob per layer and part, in memory as on disk (kv-state 3.5).

Bytes of an item: magic, version, counts; per part its scheme, dtype and shape; the length of every
blob; from a multiple of ALIGN on all blobs in order (part by part, layer by layer), then all
refinements. What an exact codec needs beyond its base is thus a suffix, and dropping it leaves a
valid item.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import chain

import torch

from expertmesh.actors.state.settings import Codec

Buffer = memoryview

_HEAD = struct.Struct("<4sBBH")
_PART = struct.Struct("<BBH")
_MAGIC, _VERSION = b"EMPK", 1
_DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
_MOST_AXES = 4
ALIGN = 64


class BadPayload(ValueError):
    """Bytes that no `Packed.buffers` has written."""


class Scheme(IntEnum):
    """How the blobs of a part are made. Numbers are on disk."""

    RAW = 0
    LOSSLESS = 1
    INT8 = 2
    INT4 = 3

    @property
    def lossy(self) -> bool:
        """Whether the blob alone gives an estimate only."""
        return self in (Scheme.INT8, Scheme.INT4)


_CODECS: dict[Scheme, Codec] = {
    Scheme.RAW: "raw",
    Scheme.LOSSLESS: "lossless",
    Scheme.INT8: "int8",
    Scheme.INT4: "int4",
}


@dataclass(frozen=True)
class Part:
    """Of a tensor with one axis the only layer is the tensor itself, of others each [0..n-1]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scheme: Scheme

    @cached_property
    def layers(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @cached_property
    def layer_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if len(self.shape) > 1 else self.shape

    @cached_property
    def layer_bytes(self) -> int:
        return math.prod(self.layer_shape) * self.dtype.itemsize

    @cached_property
    def lossy(self) -> bool:
        return self.scheme.lossy


@dataclass(frozen=True, slots=True)
class Packed:
    """parts[i] describes blobs[i][layer]; refinements[i][layer] is empty where the blob says all.

    refinements is () when they were left behind (`base`) and something lacks them.
    """

    parts: tuple[Part, ...]
    blobs: tuple[tuple[Buffer, ...], ...]
    refinements: tuple[tuple[Buffer, ...], ...]

    @property
    def codec(self) -> Codec:
        """By what was asked for, as far as the parts tell: snapshots are never lossy."""
        return _CODECS[max((part.scheme for part in self.parts), default=Scheme.RAW)]

    @property
    def exact(self) -> bool:
        """Whether it gives back the bytes that were packed."""
        return bool(self.refinements) or not any(part.lossy for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of `buffers`, and of memory but for the objects."""
        return len(self._directory()) + sum(map(len, self._all_blobs()))

    @property
    def raw_bytes(self) -> int:
        """Bytes before packing."""
        return sum(part.layers * part.layer_bytes for part in self.parts)

    def base(self) -> "Packed":
        """What is left without refinements: an estimate where the codec is lossy, else itself.

        Its memory is its own: what it was taken from can be freed.
        """
        if not any(part.lossy for part in self.parts):
            return self
        blobs = tuple(tuple(memoryview(bytes(b)) for b in blobs) for blobs in self.blobs)
        return Packed(self.parts, blobs, ())

    def buffers(self) -> list[Buffer]:
        """What `parse` reads, as pieces to be written one after the other."""
        return [memoryview(self._directory()), *self._all_blobs()]

    @classmethod
    def parse(
        cls, payload: Buffer | bytes, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]] = ()
    ) -> "Packed":
        """What was packed, as views of `payload`, which they keep alive.

        wanted: shape and dtype of its parts (StateLayout.parts), not checked when empty. Raises
        BadPayload for bytes that are no payload, are cut short or too long, or hold other parts.
        Whether the blobs themselves are right is for a checksum to say.
        """
        packed = _parse(memoryview(payload).cast("B"))
        found = [(part.shape, part.dtype) for part in packed.parts]
        if wanted and found != list(wanted):
            raise BadPayload(f"payload holds {found} instead of {list(wanted)}")
        return packed

    def _all_blobs(self) -> list[Buffer]:
        return [*chain.from_iterable(self.blobs), *chain.from_iterable(self.refinements)]

    def _directory(self) -> bytes:
        sections = 2 if self.refinements else 1
        out = [_HEAD.pack(_MAGIC, _VERSION, len(self.parts), sections)]
        for part in self.parts:
            out.append(_PART.pack(part.scheme, _DTYPES.index(part.dtype), len(part.shape)))
            out.append(struct.pack(f"<{len(part.shape)}Q", *part.shape))
        lengths = [len(blob) for blob in self._all_blobs()]
        out.append(struct.pack(f"<{len(lengths)}Q", *lengths))
        directory = b"".join(out)
        return directory.ljust(_aligned(len(directory)), b"\0")


def _parse(view: Buffer) -> Packed:
    try:
        magic, version, count, sections = _HEAD.unpack_from(view)
        if (magic, version) != (_MAGIC, _VERSION) or sections not in (1, 2):
            raise BadPayload(f"payload starts with {bytes(view[:8])!r}")
        at, parts = _HEAD.size, []
        for _ in range(count):
            part, at = _read_part(view, at)
            parts.append(part)
        blobs = sum(part.layers for part in parts)
        if blobs * sections > len(view):
            raise BadPayload(f"{blobs} blobs in {len(view)} bytes")
        lengths = struct.unpack_from(f"<{blobs * sections}Q", view, at)
        at = _aligned(at + 8 * len(lengths))
    except struct.error as error:
        raise BadPayload(f"payload of {len(view)} bytes is cut short") from error
    if at + sum(lengths) != len(view):
        raise BadPayload(f"payload of {len(view)} bytes should have {at + sum(lengths)}")
    pieces = []
    for length in lengths:
        pieces.append(view[at : at + length])
        at += length
    refinements = _grouped(parts, pieces[blobs:]) if sections == 2 else ()
    return Packed(tuple(parts), _grouped(parts, pieces[:blobs]), refinements)


def _read_part(view: Buffer, at: int) -> tuple[Part, int]:
    scheme, dtype, axes = _PART.unpack_from(view, at)
    if not 1 <= axes <= _MOST_AXES or dtype >= len(_DTYPES) or scheme > max(Scheme):
        raise BadPayload(f"part with scheme {scheme}, dtype {dtype}, {axes} axes")
    shape = struct.unpack_from(f"<{axes}Q", view, at + _PART.size)
    return Part(shape, _DTYPES[dtype], Scheme(scheme)), at + _PART.size + 8 * axes


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def _grouped(parts: Sequence[Part], pieces: list[Buffer]) -> tuple[tuple[Buffer, ...], ...]:
    left = iter(pieces)
    return tuple(tuple(next(left) for _ in range(part.layers)) for part in parts)
