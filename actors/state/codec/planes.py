"""Lossless packing of numbers: byte planes, of which those that repeat themselves are compressed.

The sign is moved behind the mantissa, so that the first plane is the exponent of bf16 and fp32:
about 2.6 bits of entropy where the values are Gaussian, 1.45x for bf16 (kv-state 2.2). The other
planes are as good as noise unless the values were widened from a shorter format.
"""

import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from expertmesh.actors.state.codec.packed import BadPayload, Buffer

Words = NDArray[Any]  # uint8, uint16 or uint32
Bytes = NDArray[np.uint8]

# A plane that saves less is kept as it is: reading it back is then a copy.
WORTH = 0.97
# Little but Huffman codes: a search for repetitions finds chance ones, which cost more than they
# save, and is slower both ways. Runs of equal bytes are still found.
_SEARCH: dict[str, Any] = {"strategy": zstandard.STRATEGY_FAST, "target_length": 0, "min_match": 7,
                           "hash_log": 6, "window_log": 17}  # fmt: skip
# Words that pass through all steps of unpacking before the next: they stay in the cache.
_PIECE = 1 << 16
_SAMPLE = 4096
_NOISE = _SAMPLE**2 * 2**-7.6  # entropy (of order two) of bytes that are not even tried
_UNPACKED = 0xFFFFFFFF
_PLANES = {1: (1,), 2: (1, 1), 4: (1, 1, 2)}  # bytes per word -> per plane


class _Own(threading.local):
    """One context per thread, neither cheap nor shareable, and memory that is never given back to
    the system: its first touch costs more than what is done with it (kv-state 2.3)."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(write_checksum=False, **_SEARCH)
        )
        self.decompressor = zstandard.ZstdDecompressor()
        self.words = np.empty(_PIECE, np.uint32)
        self.halves = np.empty((2, _PIECE), np.uint16)


_own = _Own()


def encode(words: Words, *, signed: bool = True) -> bytes:
    """words: contiguous unsigned [n] of 1, 2 or 4 bytes each, the bits of floats. signed: the top
    bit is a sign and moves to the bottom. -> a blob of at most words.nbytes + 4 bytes.

    Layout: u32 length per plane, most significant first, then the planes; one that is as long as
    it was is stored as it is. A single u32 of ones means that the words follow unpacked.
    """
    planes = [_compress(plane) for plane in _split(words, signed)]
    head = struct.pack(f"<{len(planes)}I", *map(len, planes))
    if len(head) + sum(map(len, planes)) >= words.nbytes * WORTH:
        return struct.pack("<I", _UNPACKED) + words.tobytes()
    return b"".join([head, *planes])


def decode(blob: Buffer, out: Words, *, signed: bool = True) -> None:
    """Writes the words of `encode` into `out`, contiguous [n]. Raises BadPayload."""
    decode_rows([blob], out[None], [0], signed=signed)


def decode_rows(
    blobs: Sequence[Buffer], out: Words, rows: Sequence[int], *, signed: bool = True
) -> None:
    """Writes the words of blobs[i] into out[rows[i]]; out: contiguous [any, n].

    Small blobs are unpacked together: what a step costs besides its words is paid once for many.
    Raises BadPayload when one of them is no blob of n words; others may be written then.
    """
    together = max(1, _PIECE // max(1, out.shape[1]))
    for begin in range(0, len(rows), together):
        end = begin + together
        try:
            _decode_rows(blobs[begin:end], out, rows[begin:end], signed)
        except (ValueError, MemoryError, struct.error, zstandard.ZstdError) as error:
            raise BadPayload(f"a blob does not hold {out.shape[1]} words") from error


def _decode_rows(blobs: Sequence[Buffer], out: Words, rows: Sequence[int], signed: bool) -> None:
    count, widths = out.shape[1], _PLANES[out.itemsize]
    packed, found = [], []
    for blob, row in zip(blobs, rows, strict=True):
        if struct.unpack_from("<I", blob)[0] != _UNPACKED:
            packed.append(_decompressed(blob, count, widths))
            found.append(row)
        elif len(blob) == 4 + out.itemsize * count:  # else one byte would be written everywhere
            out[row].view(np.uint8)[:] = np.frombuffer(blob, np.uint8, offset=4)
        else:
            raise ValueError(f"{len(blob)} bytes unpacked")
    if len(packed) == 1:
        _join(packed[0], out[found[0]], signed)
    elif packed:
        joined = _own.words.view(out.dtype)[: len(found) * count]
        _join([b"".join(of) for of in zip(*packed, strict=True)], joined, signed)
        out[found] = joined.reshape(len(found), count)


def _decompressed(blob: Buffer, count: int, widths: tuple[int, ...]) -> list[Buffer | bytes]:
    """The planes of `count` words each."""
    planes, at = list[Buffer | bytes](), 4 * len(widths)
    for length, width in zip(struct.unpack_from(f"<{len(widths)}I", blob), widths, strict=True):
        plane: Buffer | bytes = blob[at : at + length]
        if length != count * width:
            plane = _own.decompressor.decompress(plane, max_output_size=count * width)
        if len(plane) != count * width:
            raise ValueError(f"a plane of {len(plane)} bytes instead of {count * width}")
        planes.append(plane)
        at += length
    if at != len(blob):
        raise ValueError(f"planes of {at} bytes in {len(blob)}")
    return planes


def _split(words: Words, signed: bool) -> list[Words]:
    """Planes, most significant first: of 4 bytes the lower two stay together."""
    if words.itemsize == 1:
        return [words]
    if words.itemsize == 4:
        upper = _split((words >> 16).astype(np.uint16), signed)
        return [*upper, words.astype(np.uint16)]
    if not signed:
        return [(words >> 8).astype(np.uint8), words.astype(np.uint8)]
    mantissa = words & 0x7F
    mantissa |= (words >> 8) & 0x80
    return [(words >> 7).astype(np.uint8), mantissa.astype(np.uint8)]


def _join(planes: Sequence[Buffer | bytes], out: Words, signed: bool) -> None:
    widths = _PLANES[out.itemsize]
    words = [np.frombuffer(plane, f"u{w}") for plane, w in zip(planes, widths, strict=True)]
    step = -(-out.size // max(1, -(-out.size // _PIECE)))
    for begin in range(0, out.size, step):
        piece = out[begin : begin + step]
        upper, *lower = (plane[begin : begin + step] for plane in words)
        if not lower:
            np.copyto(piece, upper)
        elif piece.itemsize == 2:
            _join_bytes(upper, lower[0], piece, signed)
        else:
            half = _own.halves[1, : piece.size]
            _join_bytes(upper, lower[0], half, signed)
            np.copyto(piece, half)
            np.left_shift(piece, 16, out=piece)
            np.bitwise_or(piece, lower[1], out=piece)


def _join_bytes(upper: Words, lower: Words, out: Words, signed: bool) -> None:
    """Bytes [n] to words of two bytes [n], in steps that the machine does on many words at once:
    without changes of width within one, and multiplying instead of shifting."""
    shifted = _own.halves[0, : out.size]
    np.copyto(shifted, upper)
    np.multiply(shifted, 1 << 7 if signed else 1 << 8, out=shifted)
    if signed:  # sign and mantissa, spread over the word: ssss ssss smmm mmmm
        np.copyto(out.view(np.int16), lower.view(np.int8))
        np.bitwise_and(out, 0x807F, out=out)
    else:
        np.copyto(out, lower)
    np.bitwise_or(out, shifted, out=out)


def _compress(plane: Words) -> bytes | Buffer:
    raw = plane.view(np.uint8)
    if _noisy(raw):
        return raw.data
    packed = _own.compressor.compress(raw.data)
    return packed if len(packed) < raw.size * WORTH else raw.data


def _noisy(raw: Bytes) -> bool:
    """By how often two bytes of a sample are equal: trying to compress noise is wasted work."""
    if raw.size < _SAMPLE:
        return False
    counts = np.bincount(raw[:: raw.size // _SAMPLE][:_SAMPLE], minlength=256)
    return bool(counts @ counts < _NOISE)
