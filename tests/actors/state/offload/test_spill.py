"""Old pages on disk: what comes back is what was written, or nothing."""

import errno
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertmesh.actors.state.offload.context import HostPage
from expertmesh.actors.state.offload.spill import (
    AHEAD,
    Lost,
    Shape,
    Spill,
    SpilledPage,
    SpillFile,
    piece_bytes,
)
from expertmesh.actors.state.store import fill_layer
from tests.support.faulty_files import FaultyFiles

SHAPE = Shape(3, 64, 40, torch.bfloat16)
SECRET = b"sixteen bytes or more"


def rows(count: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, *SHAPE[:3], generator=draw).to(SHAPE.dtype)


def spill(folder: Path, timeout_s: float = 5.0, secret: bytes | None = None) -> Spill:
    return Spill(folder, SHAPE, timeout_s, secret, FaultyFiles())


def faults(one: Spill) -> FaultyFiles:
    assert isinstance(one.files, FaultyFiles)
    return one.files


def write(file: SpillFile, content: Tensor) -> list[SpilledPage]:
    return file.write([HostPage(page) for page in content])


def read(pages: list[SpilledPage], layer: int, out_rows: list[int] | None = None) -> Tensor:
    """[n, 64, C]; what nobody wrote is not a number."""
    where = list(range(len(pages))) if out_rows is None else out_rows
    out = torch.full((max(where) + 1, *SHAPE[1:3]), torch.nan, dtype=SHAPE.dtype)
    fill_layer(pages, 0, layer, out, where)
    return out


@pytest.fixture(params=[None, SECRET], ids=["plain", "sealed"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Spill]:
    one = spill(tmp_path, secret=request.param)
    yield one
    faults(one).hang.set()


def test_pages_come_back_layer_by_layer_and_one_by_one(made: Spill) -> None:
    file, content = SpillFile(made), rows(11)
    pages = write(file, content[:4]) + write(file, content[4:8]) + write(file, content[8:])
    for layer in range(SHAPE.layers):
        assert torch.equal(read(pages, layer), content[:, layer])
    assert len(faults(made).reads) == 3 * SHAPE.layers  # a piece at a time
    for at in (10, 0, 5):
        assert torch.equal(read([pages[at]], 1)[0], content[at, 1])
    chosen, out_rows = [0, 1, 3, 5, 6, 10], [0, 2, 3, 5, 6, 9]
    found = read([pages[at] for at in chosen], 2, out_rows)
    assert torch.equal(found[out_rows], content[chosen, 2])
    assert found[[1, 4, 7, 8]].isnan().all()
    counts = made.counts
    assert counts.written_bytes <= piece_bytes(SHAPE, 4) * 2 + piece_bytes(SHAPE, 3)
    assert counts.read_bytes == (11 * 3 + 3 + 6) * SHAPE.layer_bytes
    assert not any(counts.failures.values())


def test_many_pieces_need_little_memory(made: Spill) -> None:
    file, content = SpillFile(made), rows(40)
    pages = [page for at in range(0, 40, 2) for page in write(file, content[at : at + 2])]
    under_way, most = 0, 0
    take, give_back = made.take, made.give_back

    def counted(count: int) -> Tensor:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        return take(count)

    def given(memory: Tensor) -> None:
        nonlocal under_way
        under_way -= 1
        give_back(memory)

    made.take, made.give_back = counted, given  # type: ignore[method-assign]
    for _ in range(3):
        assert torch.equal(read(pages, 1), content[:, 1])
    assert most == AHEAD and under_way == 0 and len(made._spare) <= AHEAD


def test_what_is_encrypted_is_not_on_the_disk_in_the_clear(made: Spill) -> None:
    content = torch.full((2, *SHAPE[:3]), 1.5, dtype=SHAPE.dtype)
    file = SpillFile(made)
    write(file, content)
    (fd,) = faults(made).open_fds
    on_disk = os.pread(fd, 1 << 20, 0)
    plain = content[0, 0].view(torch.uint8).numpy().tobytes()
    assert (plain[:64] in on_disk) == (made.seal is None)


@pytest.mark.parametrize("how", ["flip", "short", "moved"])
def test_other_bytes_are_lost(made: Spill, how: str) -> None:
    file = SpillFile(made)
    pages = write(file, rows(4)) + write(file, rows(4, seed=1))
    if how == "moved":
        pages[0].piece.offset = pages[4].piece.offset  # another's, intact
    else:
        setattr(faults(made), how, True)
    with pytest.raises(Lost) as lost:
        read(pages[:4], 0)
    assert lost.value.reason == "corrupt" and made.counts.failures["corrupt"] == 1
    assert made.usable  # the disk itself answers
    faults(made).flip = faults(made).short = False
    assert torch.equal(read(pages[4:], 2), rows(4, seed=1)[:, 2])


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "full"), (errno.EIO, "io"), (errno.EDQUOT, "full")]
)
def test_a_write_that_fails(made: Spill, number: int, reason: str) -> None:
    file, content = SpillFile(made), rows(4)
    faults(made).write_errno = number
    for _ in range(3):
        with pytest.raises(Lost, match=reason):
            write(file, content)
    with pytest.raises(Lost, match="busy"):
        write(file, content)
    assert not made.usable
    faults(made).write_errno = 0
    made._breaker._until = 0.0  # the pause is over
    assert torch.equal(read(write(file, content), 0), content[:, 0]) and made.usable


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    one = spill(tmp_path / "gone")
    with pytest.raises(Lost, match="io"):
        write(SpillFile(one), rows(2))


def test_a_disk_that_hangs_costs_one_timeout(tmp_path: Path) -> None:
    """And a read that comes late writes to nobody's memory."""
    one = spill(tmp_path, timeout_s=0.2)
    file, content = SpillFile(one), rows(12)
    pages = [page for at in range(0, 12, 2) for page in write(file, content[at : at + 2])]
    faults(one).hang.clear()
    began = time.monotonic()
    out = torch.full((12, *SHAPE[1:3]), 7.0, dtype=SHAPE.dtype)
    with pytest.raises(Lost, match="timeout"):
        fill_layer(pages, 0, 0, out, range(12))
    for _ in range(5):
        with pytest.raises(Lost, match="busy"):
            read(pages, 0)
    with pytest.raises(Lost, match="busy"):
        write(file, content[:2])
    assert time.monotonic() - began < 2
    spare = list(one._spare)
    faults(one).hang.set()
    one.threads.submit(lambda: None).result(10)
    assert (out == 7.0).all() and one._spare == spare and one.threads.dead == 0
    one._breaker._until = 0.0
    assert torch.equal(read(pages, 0), content[:, 0])


def test_a_file_has_no_name_and_ends_with_its_owner(made: Spill) -> None:
    file = SpillFile(made)
    pages = write(file, rows(2)) + write(file, rows(2))
    assert os.listdir(made.folder) == [] and len(faults(made).open_fds) == 1
    last = [file]
    del file, pages
    SpillFile.discard(last)
    deadline = time.monotonic() + 10
    while faults(made).open_fds and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not faults(made).open_fds and not last


def test_threads_outlive_what_fails(made: Spill) -> None:
    def fail() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        made.threads.submit(fail).result(10)
    assert made.threads.submit(lambda: 3).result(10) == 3 and made.threads.dead == 0
