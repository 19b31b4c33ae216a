"""A packed item: one run of bytes, the same in memory as on disk (kv-state 3.5).

Magic, version, counts; per part its scheme, dtype and shape; where every blob begins, and where the
last ends; from a multiple of ALIGN on one blob per part and layer, then all refinements. What an
exact codec needs beyond its base is thus a suffix.
"""

import math
import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import accumulate

import torch

from expertmesh.actors.state.settings import Codec

Buffer = memoryview
Blob = bytes | memoryview

_HEAD = struct.Struct("<4sBBH")
_PART = struct.Struct("<BBH")
_PLACE = struct.Struct("<2Q")
_MAGIC, _VERSION = b"EMPK", 1
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)
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


@lru_cache(maxsize=256)
def part_of(shape: tuple[int, ...], dtype: torch.dtype, scheme: Scheme) -> Part:
    """One object for all items alike: there are many of them."""
    return Part(shape, dtype, scheme)


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of an item, the same for all that are alike, with what follows from it.

    table: where in the item the blobs' places stand. refined: whether lossy parts have their
    refinements. lossy: whether there are such parts. exact: whether the item gives back the bytes
    that were packed. raw_bytes: of those. pieces: blobs and refinements. shapes: of the parts.
    """

    parts: tuple[Part, ...]
    table: int
    refined: bool
    lossy: bool
    exact: bool
    raw_bytes: int
    pieces: int
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, parts: tuple[Part, ...], table: int, refined: bool) -> "Head":
        lossy = any(part.lossy for part in parts)
        raw_bytes = sum(part.layers * part.layer_bytes for part in parts)
        pieces = (1 + refined) * sum(part.layers for part in parts)
        shapes = tuple((part.shape, part.dtype) for part in parts)
        return cls(parts, table, refined, lossy, refined or not lossy, raw_bytes, pieces, shapes)


@dataclass(frozen=True, slots=True)
class Packed:
    """data: the whole item, which begins with `head`."""

    head: Head
    data: bytearray | Buffer

    @classmethod
    def of(
        cls, parts: Sequence[Part], blobs: Sequence[Blob], refinements: Sequence[Blob]
    ) -> "Packed":
        """Blobs of all parts and layers, in order; refinements: as many, or none."""
        head = [_HEAD.pack(_MAGIC, _VERSION, len(parts), 2 if refinements else 1)]
        for part in parts:
            head.append(_PART.pack(part.scheme, DTYPES.index(part.dtype), len(part.shape)))
            head.append(struct.pack(f"<{len(part.shape)}Q", *part.shape))
        read = _read_head(b"".join(head))
        pieces = [*blobs, *refinements]
        begin = _aligned(read.table + 8 * (len(pieces) + 1))
        places = list(accumulate(map(len, pieces), initial=begin))
        head.append(struct.pack(f"<{len(places)}Q", *places))
        pad = bytes(begin - read.table - 8 * len(places))
        return cls(read, bytearray().join([*head, pad, *pieces]))

    @classmethod
    def parse(
        cls, payload: Buffer | bytes, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]] = ()
    ) -> "Packed":
        """What was packed, as a view of `payload`, which it keeps alive.

        wanted: shape and dtype of its parts (StateLayout.parts), not checked when empty. Raises
        BadPayload for bytes that are no item, are cut short or too long, or hold other parts.
        Whether the blobs themselves are right is for a checksum to say.
        """
        packed = _parse(memoryview(payload).cast("B"))
        if wanted and packed.head.shapes != tuple(wanted):
            raise BadPayload(f"payload holds {packed.head.shapes} instead of {wanted}")
        return packed

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.head.parts

    @property
    def codec(self) -> Codec:
        """By what was asked for, as far as the parts tell: snapshots are never lossy."""
        return _CODECS[max((part.scheme for part in self.parts), default=Scheme.RAW)]

    @property
    def exact(self) -> bool:
        """Whether it gives back the bytes that were packed."""
        return self.head.exact

    @property
    def nbytes(self) -> int:
        """Bytes of `data`: on disk, and in memory but for one small object."""
        return len(self.data)

    @property
    def raw_bytes(self) -> int:
        """Bytes before packing."""
        return self.head.raw_bytes

    def blob(self, part: int, layer: int) -> Buffer:
        return self._piece(self._index(part, layer))

    def refinement(self, part: int, layer: int) -> Buffer | None:
        """Empty for layers whose blob says all; None where it was left behind."""
        if not self.head.refined:
            return None
        return self._piece(self._count + self._index(part, layer))

    def base(self) -> "Packed":
        """What is left without refinements: an estimate where the codec is lossy, else itself.

        Its memory is its own: what it was taken from can be freed.
        """
        if not self.head.lossy:
            return self
        return Packed.of(self.parts, [self._piece(at) for at in range(self._count)], ())

    def buffers(self) -> list[Buffer]:
        """What `parse` reads, as pieces to be written one after the other."""
        return [memoryview(self.data)]

    @property
    def _count(self) -> int:
        return sum(part.layers for part in self.parts)

    def _index(self, part: int, layer: int) -> int:
        if not 0 <= layer < self.parts[part].layers:
            raise IndexError(f"layer {layer} of {self.parts[part]}")
        return sum(before.layers for before in self.parts[:part]) + layer

    def _piece(self, index: int) -> Buffer:
        begin, end = _PLACE.unpack_from(self.data, self.head.table + 8 * index)
        return memoryview(self.data)[begin:end]


def blobs(items: Sequence[Packed], part: int, layer: int) -> list[Buffer]:
    """The `blob` of each. All items have one head: where in them its place stands is found once."""
    index = items[0]._index(part, layer)
    return [item._piece(index) for item in items]


def _parse(view: Buffer) -> Packed:
    try:
        table = _HEAD.size
        for _ in range(_HEAD.unpack_from(view)[2]):
            table += _PART.size + 8 * _PART.unpack_from(view, table)[2]
        head = _read_head(bytes(view[:table]))
        if head.pieces > len(view):
            raise BadPayload(f"{head.pieces} blobs in {len(view)} bytes")
        places = struct.unpack_from(f"<{head.pieces + 1}Q", view, table)
    except struct.error as error:
        raise BadPayload(f"payload of {len(view)} bytes is cut short") from error
    if places[-1] != len(view) or places[0] != _aligned(table + 8 * len(places)):
        raise BadPayload(f"blobs at {places[0]} to {places[-1]} of {len(view)} bytes")
    if any(map(operator.gt, places, places[1:])):
        raise BadPayload("a blob ends before it begins")
    return Packed(head, view)


@lru_cache(maxsize=256)
def _read_head(head: bytes) -> Head:
    """Remembered: there are many items and few beginnings."""
    magic, version, count, sections = _HEAD.unpack_from(head)
    if (magic, version) != (_MAGIC, _VERSION) or sections not in (1, 2):
        raise BadPayload(f"payload starts with {head[:8]!r}")
    at, parts = _HEAD.size, []
    for _ in range(count):
        part, at = _read_part(head, at)
        parts.append(part)
    return Head.of(tuple(parts), at, sections == 2)


def _read_part(head: bytes, at: int) -> tuple[Part, int]:
    scheme, dtype, axes = _PART.unpack_from(head, at)
    if not 1 <= axes <= _MOST_AXES or dtype >= len(DTYPES) or scheme > Scheme.INT4:
        raise BadPayload(f"part with scheme {scheme}, dtype {dtype}, {axes} axes")
    shape = struct.unpack_from(f"<{axes}Q", head, at + _PART.size)
    return part_of(shape, DTYPES[dtype], Scheme(scheme)), at + _PART.size + 8 * axes


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN
