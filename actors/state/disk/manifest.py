"""The authority on what a folder holds: a log of entries, and checkpoints of what they add up to.

Files of a generation g: `index-g` (all that was there when it began) and `manifest-g` (what has
happened since). A generation begins on every start, when the log has grown long, and after a
failed write to it, whose outcome nobody knows. The one before is kept, in case `index-g` is
damaged later (kv-state 3.8 items 1 and 2).
"""

import struct
import zlib
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import NamedTuple

import xxhash

from expertmesh.actors.state.disk.record import Place
from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.keys import KEY_BYTES

VERSION = 1
PINNED = 1


class Op(IntEnum):
    """Numbers are on disk. REMOVE, PIN and UNPIN concern what stands at a place, which may be in
    another writer's folder; DROP a whole segment."""

    PUT = 1
    REMOVE = 2
    PIN = 3
    UNPIN = 4
    DROP = 5


class Entry(NamedTuple):
    """position: of the item's end, in tokens. stamp: nanoseconds; the newest of several sessions of
    one name, in the folders of several writers, counts."""

    op: Op
    name: Name
    place: Place
    raw_bytes: int = 0
    position: int = 0
    stamp: int = 0
    pinned: bool = False


# version, op, kind, flags, sequence, segment, offset, bytes, raw bytes, position, stamp, key;
# a CRC behind
_ENTRY = struct.Struct("<BBBBQQQQQQQ32s")
_CRC = struct.Struct("<I")
_SLOT = struct.Struct(_ENTRY.format + "I")
ENTRY_BYTES = _ENTRY.size + _CRC.size
# magic, version, generation, sequence of the manifest's first entry, next segment, entries,
# xxh3-128 of them; a CRC behind
_INDEX = struct.Struct("<8sHQQQQ16s")
INDEX_MAGIC = b"EMindex\n"
NOTHING = Name(bytes(KEY_BYTES), Kind.PAGE)
# Calling an enumeration to look a number up takes longer than all the rest of an entry.
_OPS = {int(op): op for op in Op}
_KINDS = {int(kind): kind for kind in Kind}


def dropped(segment: int) -> Entry:
    return Entry(Op.DROP, NOTHING, Place(segment, 0, 0))


def pack(entries: Iterable[Entry], sequence: int) -> bytes:
    """Of consecutive entries, the first with this sequence number."""
    out = bytearray()
    for number, entry in enumerate(entries, sequence):
        body = _ENTRY.pack(
            VERSION,
            entry.op,
            entry.name.kind,
            PINNED if entry.pinned else 0,
            number,
            *entry.place,
            entry.raw_bytes,
            entry.position,
            entry.stamp,
            entry.name.key,
        )
        out += body + _CRC.pack(zlib.crc32(body))
    return bytes(out)


def unpack(data: bytes, sequence: int | None) -> Iterator[tuple[int, Entry | None]]:
    """(sequence number, entry) of each whole slot; None for one that is torn or damaged, or was
    not written as that number. sequence: of the first slot; None where nobody knows any more."""
    view = memoryview(data)
    for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        body = view[start : start + _ENTRY.size]
        version, op, kind, flags, number, *rest = _ENTRY.unpack(body)
        intact = _CRC.unpack_from(view, start + _ENTRY.size)[0] == zlib.crc32(body)
        slot = start // ENTRY_BYTES
        if intact and sequence is None:
            sequence = number - slot
        if not intact or version != VERSION or number != (sequence or 0) + slot:
            yield (sequence or 0) + slot, None
        else:
            yield number, _entry(op, kind, flags, *rest)


class Checkpoint(NamedTuple):
    generation: int
    sequence: int
    next_segment: int
    entries: list[Entry]


def pack_checkpoint(checkpoint: Checkpoint) -> bytes:
    body = pack(checkpoint.entries, 0)
    head = _INDEX.pack(
        INDEX_MAGIC,
        VERSION,
        checkpoint.generation,
        checkpoint.sequence,
        checkpoint.next_segment,
        len(checkpoint.entries),
        xxhash.xxh3_128_digest(body),
    )
    return head + _CRC.pack(zlib.crc32(head)) + body


def unpack_checkpoint(data: bytes, generation: int) -> Checkpoint | None:
    """None where it is not wholly what was written for this generation."""
    begin = _INDEX.size + _CRC.size
    if len(data) < begin or _CRC.unpack_from(data, _INDEX.size)[0] != zlib.crc32(
        memoryview(data)[: _INDEX.size]
    ):
        return None
    magic, version, number, sequence, next_segment, count, digest = _INDEX.unpack_from(data)
    body = memoryview(data)[begin:]
    if (magic, version, number) != (INDEX_MAGIC, VERSION, generation):
        return None
    if len(body) != count * ENTRY_BYTES or xxhash.xxh3_128_digest(body) != digest:
        return None
    entries = [
        _entry(op, kind, flags, *rest)
        for _, op, kind, flags, _, *rest, _ in _SLOT.iter_unpack(body)
    ]
    return Checkpoint(generation, sequence, next_segment, entries)


def _entry(
    op: int,
    kind: int,
    flags: int,
    segment: int,
    offset: int,
    nbytes: int,
    raw_bytes: int,
    position: int,
    stamp: int,
    key: bytes,
) -> Entry:
    return Entry(
        _OPS[op],
        Name(key, _KINDS[kind]),
        Place(segment, offset, nbytes),
        raw_bytes,
        position,
        stamp,
        bool(flags & PINNED),
    )
