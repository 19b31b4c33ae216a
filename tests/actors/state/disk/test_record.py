import struct
import zlib
from collections.abc import Callable

import pytest
import xxhash

from expertmesh.actors.state.disk.record import (
    HEADER_BYTES,
    Damaged,
    Place,
    Record,
    decode,
    encode,
    record_bytes,
)
from expertmesh.actors.state.disk.seal import Seal
from expertmesh.actors.state.item import Kind
from tests.actors.state.disk.workload import LAYOUT, header

ITEM = header(7)
PAYLOAD = bytes(range(200)) * 3
SECRET = b"sixteen bytes at least"


def stored(seal: Seal | None = None, place: Place | None = None) -> tuple[bytearray, Place]:
    nbytes = record_bytes(ITEM, [PAYLOAD], seal)
    place = place or Place(3, 8192, nbytes)
    pieces = encode(ITEM, "lossless", 1234, [PAYLOAD[:5], PAYLOAD[5:]], place, seal)
    return bytearray(b"".join(pieces)), place


def read(data: bytes | bytearray, place: Place, seal: Seal | None = None) -> Record:
    body = memoryview(data)[HEADER_BYTES : place.nbytes]
    return decode(bytes(data[:HEADER_BYTES]), body, ITEM.name, LAYOUT, place, seal)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_gives_back_what_was_put(secret: bytes | None) -> None:
    seal = Seal(secret) if secret else None
    data, place = stored(seal)
    record = read(data, place, seal)
    assert (record.header, record.codec, record.raw_bytes) == (ITEM, "lossless", 1234)
    assert bytes(record.payload) == PAYLOAD
    assert len(data) % 4096 == 0 and (secret is None) == (PAYLOAD in data)


def test_every_bit_of_the_header_counts() -> None:
    data, place = stored()
    for bit in range(8 * HEADER_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match="header"):
            read(data, place)
        data[bit // 8] ^= 1 << bit % 8
    assert read(data, place).header == ITEM


@pytest.mark.parametrize("at", [HEADER_BYTES, HEADER_BYTES + 255, HEADER_BYTES + 256, -1])
def test_every_bit_of_the_body_counts(at: int) -> None:
    data, place = stored()
    data[at if at >= 0 else place.nbytes - 1] ^= 1
    with pytest.raises(Damaged, match="payload"):
        read(data, place)


def repaired(change: Callable[[bytearray], None]) -> bytearray:
    """A record with a changed header whose CRC is right: written so, by a bug or another model."""
    data, _ = stored()
    change(data)
    data[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack(
        "<I", zlib.crc32(memoryview(data)[: HEADER_BYTES - 4])
    )
    return data


def put(at: int, value: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        assert data[at : at + len(value)] != value
        data[at : at + len(value)] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(0, b"X"), "version"),
        (put(8, b"\2"), "version"),
        (put(10, bytes([Kind.SNAPSHOT])), "key"),
        (put(30, b"another key"), "key"),
        (put(96, b"another layout"), "layout"),
    ],
)
def test_an_intact_record_of_something_else(
    change: Callable[[bytearray], None], reason: str
) -> None:
    _, place = stored()
    with pytest.raises(Damaged, match=reason):
        read(repaired(change), place)


def test_an_intact_record_at_a_wrong_place() -> None:
    data, place = stored()
    for wrong in (place._replace(segment=4), place._replace(offset=0)):
        with pytest.raises(Damaged, match="place"):
            read(data, wrong)


def test_a_length_that_its_parts_do_not_add_up_to() -> None:
    data, place = stored()
    with pytest.raises(Damaged, match="length"):
        read(data, place._replace(nbytes=place.nbytes + 1))


DIGEST = slice(156, 172)


def forge(data: bytearray, place: Place) -> bytearray:
    """The same record with another body, by someone who knows the format and no secret."""
    data[place.nbytes - 40] ^= 1
    data[DIGEST] = xxhash.xxh3_128_digest(memoryview(data)[HEADER_BYTES : place.nbytes])
    data[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack(
        "<I", zlib.crc32(memoryview(data)[: HEADER_BYTES - 4])
    )
    return data


def test_a_checksum_does_not_stop_a_forger_and_a_seal_does() -> None:
    plain, place = stored()
    assert bytes(read(forge(plain, place), place).payload) != PAYLOAD
    sealed, place = stored(Seal(SECRET))
    with pytest.raises(Damaged, match="seal"):
        read(forge(sealed, place), place, Seal(SECRET))


def test_a_seal_vouches_for_the_header_too() -> None:
    sealed, place = stored(Seal(SECRET))
    sealed[112] ^= 1  # position
    sealed[HEADER_BYTES - 4 : HEADER_BYTES] = struct.pack(
        "<I", zlib.crc32(memoryview(sealed)[: HEADER_BYTES - 4])
    )
    with pytest.raises(Damaged, match="seal"):
        read(sealed, place, Seal(SECRET))


@pytest.mark.parametrize("written, wanted", [(None, SECRET), (SECRET, None), (SECRET, SECRET[1:])])
def test_another_secret_or_none(written: bytes | None, wanted: bytes | None) -> None:
    data, place = stored(Seal(written + b"x") if written else None)
    with pytest.raises(Damaged, match="seal"):
        read(data, place, Seal(wanted + b"y") if wanted else None)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Seal(b"short")


def test_headers_that_do_not_fit_are_refused() -> None:
    _, place = stored()
    with pytest.raises(ValueError, match="15 bytes"):
        encode(ITEM, "a codec of a long name", 0, [], place, None)
