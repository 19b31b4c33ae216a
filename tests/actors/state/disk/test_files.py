import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.files import IOV_MAX, Files


def test_writes_and_reads_more_pieces_than_one_call_takes(tmp_path: Path) -> None:
    files, pieces = Files(), [bytes([n % 251]) * (n % 7) for n in range(3 * IOV_MAX)]
    fd = files.create(tmp_path / "file")
    files.write(fd, pieces, 10)
    whole = b"".join(pieces)
    view = memoryview(bytearray(len(whole) + 50))
    assert files.read(fd, [view[:100], view[100:]], 10) == len(whole)
    assert bytes(view[: len(whole)]) == whole and files.size(tmp_path / "file") == 10 + len(whole)
    files.close(fd)


def test_goes_on_after_short_writes_and_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwritev, preadv = os.pwritev, os.preadv

    def short_write(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return pwritev(fd, [b"".join(buffers)[:3]], offset)

    def short_read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return preadv(fd, [next(view for view in buffers if len(view))[:3]], offset)

    files = Files()
    fd = files.create(tmp_path / "file")
    monkeypatch.setattr(os, "pwritev", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    files.write(fd, [b"", b"0123", b"4", b"", b"56789"], 0)
    view = memoryview(bytearray(b"x" * 14))
    assert files.read(fd, [view[:4], view[4:5], view[5:]], 0) == 10
    assert bytes(view) == b"0123456789xxxx"
    files.close(fd)


def test_one_holder_of_a_lock_at_a_time(tmp_path: Path) -> None:
    files = Files()
    held = files.lock(tmp_path / "lock")
    assert held is not None and files.lock(tmp_path / "lock") is None
    files.close(held)
    again = files.lock(tmp_path / "lock")
    assert again is not None
    files.close(again)


def test_counts_blocks_and_not_holes(tmp_path: Path) -> None:
    files = Files()
    fd = files.create(tmp_path / "file")
    os.ftruncate(fd, 1 << 20)
    assert files.allocated(tmp_path) == 0
    files.allocate(fd, 1 << 20)
    assert files.allocated(tmp_path) >= 1 << 20
    files.truncate(tmp_path / "file", 4096)
    assert files.allocated(tmp_path) <= 8192
    files.close(fd)


def test_unlinking_what_is_gone_is_no_error(tmp_path: Path) -> None:
    Files().unlink(tmp_path / "nothing")
