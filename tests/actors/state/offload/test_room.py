"""Who may fill how much of host memory and disk, counted."""

import random

import pytest
import torch

from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.offload.room import Far, OffloadRoom
from expertmesh.actors.state.offload.spill import Shape, piece_bytes
from expertmesh.actors.state.settings import StateSettings

LAYOUT = StateLayout((3, 64, 40), (6, 2, 16, 16), (6, 3, 96), torch.bfloat16)
PAGE = 3 * 64 * 40 * 2
PIECE = piece_bytes(Shape(3, 64, 40, torch.bfloat16), 4)  # of 256 tokens, on disk


def room(host: int, disk: int, codec: str = "raw", folder: bool = True) -> OffloadRoom:
    """host: pages. disk: pieces of four."""
    settings = StateSettings(
        sink_tokens=64,
        window_tokens=128,
        offload_bytes=host * PAGE,
        offload_disk_bytes=disk * PIECE + PIECE // 2,
        offload_disk_tokens=256,
        codec=codec,
        disk="/nowhere",
        disk_bytes=1 << 30,
    )
    return OffloadRoom(settings, LAYOUT, disk=folder)


def tokens(pages: int) -> int:
    """After which so many are off the device."""
    return (pages + 3) * 64


def far(of: OffloadRoom, pages: int, mode: str = "offload", disk: bool = True) -> Far:
    made = of.far(mode, tokens(pages), disk)
    assert made.pages == pages
    return made


def test_what_a_sequence_has_off_the_device() -> None:
    one = room(10, 2)
    assert far(one, 7) == Far(7, 7 * PAGE, 0)  # the newest piece is never whole
    assert far(one, 8) == Far(8, 8 * PAGE, 1)
    assert far(one, 15) == Far(15, 15 * PAGE, 2)
    assert far(one, 15, disk=False) == far(room(10, 0), 15) == Far(15, 15 * PAGE, 0)
    assert far(room(10, 2, folder=False), 15) == Far(15, 15 * PAGE, 0)
    assert one.far("exact", tokens(15)) == one.far("offload", 64) == Far()
    with_base = room(10, 2, "int8")
    assert far(with_base, 15, "select").nbytes > far(with_base, 15).nbytes == 15 * PAGE
    assert one.disk_capacity == 2 * PIECE and room(10, 0).disk_capacity == 0


def test_alone_it_may_fill_both() -> None:
    one = room(10, 2)
    assert one.ever(far(one, 18)) and not one.ever(far(one, 19))
    assert not one.ever(far(one, 11, disk=False))
    assert one.hold(1, far(one, 10)) and one.on_disk(1) == 0 and one.free == 0
    assert one.hold(1, far(one, 11)) and one.on_disk(1) == 1 and one.held(1) == 7 * PAGE
    assert one.hold(1, far(one, 18)) and one.on_disk(1) == 2 and one.held(1) == 10 * PAGE
    assert not one.hold(1, far(one, 19)) and one.held(1) == 10 * PAGE
    assert one.disk_bytes == 2 * PIECE
    one.let_go(1)
    assert (one.free, one.disk_bytes) == (10 * PAGE, 0)


def test_who_has_most_in_memory_makes_room() -> None:
    one = room(20, 9)
    assert one.hold(1, far(one, 16)) and one.hold(2, far(one, 4)) and one.free == 0
    assert one.hold(3, far(one, 8))
    assert [one.on_disk(n) for n in (1, 2, 3)] == [2, 0, 0]
    assert one.hold(4, far(one, 6))
    assert [one.on_disk(n) for n in (1, 2, 3, 4)] == [3, 0, 1, 0]
    assert [one.held(n) // PAGE for n in (1, 2, 3, 4)] == [4, 4, 4, 6]
    assert not one.hold(5, far(one, 3)) and one.held(5) == 0  # nothing whole is left in memory
    assert one.hold(5, far(one, 2))


def test_what_others_would_leave() -> None:
    one = room(12, 1)
    assert one.hold(1, far(one, 8)) and one.hold(2, far(one, 8)) and one.on_disk(1) == 1
    more = far(one, 6)
    assert not one.fits(3, more) and not one.hold(3, more)
    assert one.fits(3, more, without=[2]) and one.fits(3, more, without=[1])
    assert not one.fits(3, far(one, 13), without=[2]) and one.fits(3, far(one, 16), without=[1, 2])
    assert one.fits(1, far(one, 8)) and not one.fits(1, far(one, 9))


@pytest.mark.parametrize("seed", range(8))
def test_random_moves_never_fill_more_than_there_is(seed: int) -> None:
    rng = random.Random(seed)
    host, disk = rng.choice((8, 20)), rng.choice((0, 1, 5))
    one = room(host, disk, rng.choice(("raw", "int8")))
    held: dict[int, Far] = {}
    refused = moved = 0
    for _ in range(3000):
        number, mode = rng.randrange(5), rng.choice(("offload", "select"))
        if rng.random() < 0.1:
            one.let_go(number)
            held.pop(number, None)
        else:
            grown = held.get(number, Far()).pages + rng.randrange(4)
            want = far(one, grown, mode, disk=number != 4)
            before = [(one.held(n), one.on_disk(n)) for n in range(5)]
            fits = one.fits(number, want)
            assert one.hold(number, want) == fits
            if fits:
                held[number] = want
                moved += [one.on_disk(n) for n in range(5)] != [pieces for _, pieces in before]
            else:
                refused += 1
                assert [(one.held(n), one.on_disk(n)) for n in range(5)] == before
        pieces = [one.on_disk(n) for n in range(5)]
        assert all(n in held or not pieces[n] for n in range(5)) and not pieces[4]
        assert all(pieces[n] <= max(0, held[n].pages // 4 - 1) for n in held)
        assert sum(one.held(n) for n in held) == one.capacity - one.free
        assert sum(h.nbytes for h in held.values()) == (
            one.capacity - one.free + sum(pieces) * 4 * PAGE
        )
        assert one.free >= 0 and one.disk_bytes == sum(pieces) * PIECE <= one.disk_capacity
    assert refused > 20 and (moved > 5 or not disk)
