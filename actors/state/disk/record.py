"""One item on disk: a fixed header, then its token ids and payload (kv-state 3.8).

    0    header, 192 bytes, its CRC last
    192  token ids, 4 bytes each, filled up to a multiple of 64
    ...  payload; with a seal, both are encrypted and a tag follows
    ...  zeros up to a multiple of 4 KiB

The header says where the record belongs (segment, offset) besides what it is, so that bytes that
a device wrote to, or read from, a wrong place are found however intact they are.
"""

import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from expertmesh.actors.state.disk.files import Buffer
from expertmesh.actors.state.disk.seal import TAG_BYTES, Seal
from expertmesh.actors.state.item import Header, Lineage, Name
from expertmesh.actors.state.keys import KEY_BYTES

MAGIC = b"EMstate\n"
VERSION = 1
ALIGN = 4096
SEALED = 1
LINEAGES: tuple[Lineage, ...] = ("prefill", "decode")

# magic, version, kind, lineage, flags, codec, key, parent, layout, position, tokens, payload bytes,
# raw bytes, segment, offset, xxh3-128 of the body as stored, nonce
_FIELDS = struct.Struct("<8sHBBH16p32s33p17pQIQQQQ16s12s")
_CRC = struct.Struct("<I")
HEADER_BYTES = 192


class Place(NamedTuple):
    """segment: 64-bit number, never used twice. nbytes: without the zeros behind."""

    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Record:
    """A verified item. payload: as it was appended, in one piece; 64-byte aligned in its buffer.

    digest: xxh3-128 of `body`, in which the payload lies, so that whoever keeps it need not hash it
    again; empty where it was sealed. verify_seconds: of hashing, or of breaking the seal.
    """

    header: Header
    codec: str
    raw_bytes: int
    payload: memoryview
    body: memoryview | None = None
    digest: bytes = b""
    verify_seconds: float = 0.0


class Damaged(Exception):
    """Bytes that are not the record that was asked for. reason: a counter's label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def aligned(nbytes: int, to: int = ALIGN) -> int:
    return -(-nbytes // to) * to


def record_bytes(header: Header, payload: Sequence[Buffer], seal: Seal | None) -> int:
    """Of the record to be, without the zeros behind."""
    body = aligned(4 * len(header.tokens), 64) + sum(memoryview(piece).nbytes for piece in payload)
    return HEADER_BYTES + body + (TAG_BYTES if seal else 0)


def encode(
    header: Header,
    codec: str,
    raw_bytes: int,
    payload: Sequence[Buffer],
    place: Place,
    seal: Seal | None,
) -> list[Buffer]:
    """The record's bytes with the zeros, in pieces; the payload is not copied unless sealed.
    Raises ValueError for a header that does not fit its fields."""
    if len(header.key) != KEY_BYTES or len(header.parent) > 32 or len(header.layout) > 16:
        raise ValueError("a key has 32 bytes, a parent at most 32, a layout at most 16")
    if len(codec.encode()) > 15:
        raise ValueError(f"codec {codec!r} is longer than 15 bytes")
    tokens = struct.pack(f"<{len(header.tokens)}I", *header.tokens)
    body: list[Buffer] = [tokens, bytes(-len(tokens) % 64)]
    body += [memoryview(piece).cast("B") for piece in payload]
    nonce = b""
    if seal is not None:
        nonce, sealed = seal.close(b"".join(body), _sealed_about(header, codec, raw_bytes, place))
        body = [sealed]
    digest = xxhash.xxh3_128()
    for piece in body:
        digest.update(piece)
    head = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        LINEAGES.index(header.lineage),
        SEALED if seal else 0,
        codec.encode(),
        header.key,
        header.parent,
        header.layout,
        header.position,
        len(header.tokens),
        sum(memoryview(piece).nbytes for piece in payload),
        raw_bytes,
        place.segment,
        place.offset,
        digest.digest(),
        nonce,
    ).ljust(HEADER_BYTES - _CRC.size, b"\0")
    return [head, _CRC.pack(zlib.crc32(head)), *body, bytes(-place.nbytes % ALIGN)]


def decode(
    head: Buffer, body: memoryview, name: Name, layout: bytes, place: Place, seal: Seal | None
) -> Record:
    """What `encode` was given, after every check there is. Raises Damaged.

    name, layout: what is wanted; place: where it was read. body: place.nbytes - HEADER_BYTES.
    """
    fields = bytes(head[: -_CRC.size])
    if _CRC.unpack(head[-_CRC.size :])[0] != zlib.crc32(fields):
        raise Damaged("header")
    magic, version, kind, lineage, flags, codec, key, parent, made_for, *rest = _FIELDS.unpack_from(
        fields
    )
    position, tokens, payload, raw_bytes, segment, offset, digest, nonce = rest
    if magic != MAGIC or version != VERSION:
        raise Damaged("version")
    if (segment, offset) != (place.segment, place.offset):
        raise Damaged("place")
    if key != name.key or kind != name.kind:
        raise Damaged("key")
    if made_for != layout:
        raise Damaged("layout")
    begin = aligned(4 * tokens, 64)
    sealed = TAG_BYTES if flags & SEALED else 0
    if begin + payload + sealed != len(body) or bool(sealed) != (seal is not None):
        raise Damaged("sealed" if bool(sealed) != (seal is not None) else "length")
    begun = time.perf_counter()
    if xxhash.xxh3_128_digest(body) != digest:
        raise Damaged("payload")
    if seal is not None:
        header = Header(key, name.kind, parent, position, (), LINEAGES[lineage], made_for)
        about = _sealed_about(header, codec.decode(), raw_bytes, place)
        plain = seal.open(nonce, body, about)
        if plain is None:
            raise Damaged("sealed")
        body, digest = memoryview(plain), b""
    spent = time.perf_counter() - begun
    ids = tuple(body[: 4 * tokens].cast("I"))
    header = Header(key, name.kind, parent, position, ids, LINEAGES[lineage], made_for)
    found = body[begin : begin + payload]
    return Record(header, codec.decode(), raw_bytes, found, body, digest, spent)


def _sealed_about(header: Header, codec: str, raw_bytes: int, place: Place) -> bytes:
    """What the seal vouches for besides the body: all of the header that has a meaning."""
    item = (header.name, header.parent, header.position, header.lineage, header.layout)
    return repr((VERSION, item, codec, raw_bytes, tuple(place))).encode()
