import pytest

from expertmesh.actors.state.disk.index import Index
from expertmesh.actors.state.disk.manifest import (
    ENTRY_BYTES,
    Checkpoint,
    Entry,
    Op,
    dropped,
    pack,
    pack_checkpoint,
    unpack,
    unpack_checkpoint,
)
from expertmesh.actors.state.disk.record import Place
from expertmesh.actors.state.item import Kind, Name

SEGMENT = 1 << 32


def put(number: int, segment: int = SEGMENT, pinned: bool = False) -> Entry:
    place = Place(segment, 4096 * number, 4000)
    key = number.to_bytes(32, "big")
    return Entry(Op.PUT, Name(key, Kind.PAGE), place, 9000, 64 * number, number, pinned)


ENTRIES = [put(1), put(2, pinned=True), put(1)._replace(op=Op.REMOVE), dropped(SEGMENT)]


def test_gives_back_entries_with_their_numbers() -> None:
    assert list(unpack(pack(ENTRIES, 5), 5)) == list(enumerate(ENTRIES, 5))
    assert list(unpack(pack(ENTRIES, 5), None)) == list(enumerate(ENTRIES, 5))


def test_every_bit_of_an_entry_counts_and_others_stay() -> None:
    data = bytearray(pack(ENTRIES[:3], 0))
    for bit in range(8 * ENTRY_BYTES, 16 * ENTRY_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        assert [entry for _, entry in unpack(bytes(data), 0)] == [ENTRIES[0], None, ENTRIES[2]]
        data[bit // 8] ^= 1 << bit % 8


def test_a_torn_tail_is_no_entry() -> None:
    data = pack(ENTRIES[:2], 0)
    for size in range(ENTRY_BYTES, 2 * ENTRY_BYTES):
        assert list(unpack(data[:size], 0)) == [(0, ENTRIES[0])]
        holed = data[:size] + bytes(2 * ENTRY_BYTES - size)
        assert list(unpack(holed, 0)) == [(0, ENTRIES[0]), (1, None)]


def test_an_entry_of_another_time_is_none() -> None:
    assert list(unpack(pack(ENTRIES[:1], 7), 6)) == [(6, None)]


def test_checkpoint_is_whole_or_nothing() -> None:
    checkpoint = Checkpoint(3, 77, 5, ENTRIES[:2])
    data = bytearray(pack_checkpoint(checkpoint))
    assert unpack_checkpoint(bytes(data), 3) == checkpoint
    assert unpack_checkpoint(bytes(data), 4) is None
    assert unpack_checkpoint(bytes(data[:-1]), 3) is None
    assert unpack_checkpoint(b"", 3) is None
    for byte in range(len(data)):
        data[byte] ^= 1 << byte % 8
        assert unpack_checkpoint(bytes(data), 3) is None
        data[byte] ^= 1 << byte % 8


def test_index_counts_what_lives_where() -> None:
    index = Index(1)
    for entry in (put(0), put(1, pinned=True), put(2, SEGMENT + 1)):
        index.apply(entry)
    held = index.segments[SEGMENT]
    assert (held.live, held.pinned, held.end, len(held.names)) == (8192, 4096, 8192, 2)
    index.apply(put(1)._replace(op=Op.UNPIN))
    index.apply(put(0)._replace(op=Op.REMOVE))
    assert (held.live, held.pinned, held.end) == (4096, 0, 8192)
    tally = index.tallies[Kind.PAGE]
    assert (tally.items, tally.nbytes, tally.raw_bytes, tally.pinned) == (2, 8192, 18000, 0)
    index.apply(dropped(SEGMENT))
    assert list(index.entries) == [put(2).name] and list(index.segments) == [SEGMENT + 1]


def test_index_removes_only_what_stands_at_the_place() -> None:
    index = Index(1)
    moved = put(1, SEGMENT + 1)
    index.apply(put(1))
    index.apply(moved)
    index.apply(put(1)._replace(op=Op.REMOVE))
    assert index.entries[moved.name] == moved


@pytest.mark.parametrize("order", [1, -1])
def test_index_remembers_the_strongest_word_about_other_folders(order: int) -> None:
    index = Index(2)
    for op in (Op.UNPIN, Op.REMOVE)[::order]:
        index.apply(put(1)._replace(op=op))
    assert [entry.op for entry in index.elsewhere.values()] == [Op.REMOVE]
    assert not index.entries and not index.segments
