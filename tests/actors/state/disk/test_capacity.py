"""Bytes on a real file system stay under the cap, and eviction takes the right ones."""

import os
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.errors import DiskFull
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Kind
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import SEGMENT, header, open_log

PER_SEGMENT = SEGMENT // 4096


def allocated(root: Path) -> int:
    files = [path for path in root.rglob("*") if path.is_file()]
    return sum(os.stat(path).st_blocks * 512 for path in files)


def put(log: DiskLog, *numbers: int, pinned: bool = False) -> None:
    for number in numbers:
        log.append(header(number), "raw", 5, [bytes(3000)], pinned=pinned)


def pages(log: DiskLog) -> set[int]:
    return {int.from_bytes(name.key, "big") for name in log.names(Kind.PAGE)}


def test_allocated_blocks_stay_under_the_cap(tmp_path: Path) -> None:
    log = open_log(Files(), tmp_path, segments=8)
    for start in range(0, 160, 8):
        put(log, *range(start, start + 8))
        log.sync()
        assert allocated(tmp_path) <= 8 * SEGMENT
    assert log.stats().evictions > 60
    assert {159, 158} <= pages(log) and 0 not in pages(log)
    assert log.stats().page_bytes == 4096 * len(pages(log))
    log.close()
    again = open_log(Files(), tmp_path, segments=8)
    assert all(again.read(header(number).name) for number in pages(again))
    again.close()


def test_blocks_that_were_not_needed_are_given_back(tmp_path: Path) -> None:
    for turn in range(6):  # each begins a segment
        log = open_log(Files(), tmp_path, segments=64)
        put(log, turn)
        log.sync()
        log.close()
    assert allocated(tmp_path) <= 6 * 4096 + 8 * 4096
    log = open_log(Files(), tmp_path, segments=64)
    put(log, 6)
    log.sync()
    del log  # killed, as far as the files can tell


@pytest.fixture
def log() -> DiskLog:
    return open_log(SimulatedFiles(Disk()), segments=8)


def test_what_was_read_lately_outlives_what_was_not(log: DiskLog) -> None:
    put(log, *range(4 * PER_SEGMENT))
    log.sync()
    for number in range(PER_SEGMENT):
        assert log.read(header(number).name)
    put(log, *range(100, 100 + 4 * PER_SEGMENT))
    log.sync()
    assert set(range(PER_SEGMENT)) <= pages(log)
    assert not set(range(PER_SEGMENT, 2 * PER_SEGMENT)) & pages(log)


def test_segments_in_which_nothing_lives_go_first(log: DiskLog) -> None:
    put(log, *range(6 * PER_SEGMENT))
    log.sync()
    log.remove([header(number).name for number in range(2 * PER_SEGMENT, 3 * PER_SEGMENT)])
    put(log, *range(100, 100 + PER_SEGMENT))
    log.sync()
    assert set(range(2 * PER_SEGMENT)) <= pages(log) and log.stats().evictions == 0


def test_pinned_items_are_copied_on_and_unpinned_ones_are_not(log: DiskLog) -> None:
    put(log, 0, 1, pinned=True)
    for start in range(100, 400, 8):
        put(log, *range(start, start + 8))
        log.sync()
    assert {0, 1} <= pages(log) and log.stats().pinned == 2
    assert log.read(header(0).name) and log.read(header(1).name)
    log.unpin([header(0).name])
    for start in range(400, 600, 8):
        put(log, *range(start, start + 8))
        log.sync()
    assert 0 not in pages(log) and 1 in pages(log)


def test_pinning_later_counts_as_well(log: DiskLog) -> None:
    put(log, 0, 1)
    log.sync()
    assert log.pin([header(0).name, header(9).name]) == [header(9).name]
    for start in range(100, 300, 8):
        put(log, *range(start, start + 8))
        log.sync()
    assert 0 in pages(log) and 1 not in pages(log)


def test_full_of_what_is_pinned_refuses_and_goes_on_when_it_is_not(log: DiskLog) -> None:
    number = 0
    with pytest.raises(DiskFull):
        while True:
            put(log, number, pinned=True)
            log.sync()
            number += 1
    assert pages(log) == set(range(number)) and number >= 5 * PER_SEGMENT
    assert log.stats().read_only == "full"
    log.unpin([header(n).name for n in range(number)])
    log.sync()
    put(log, 500)
    assert log.sync() == [header(500).name] and log.stats().read_only == ""


def test_a_group_larger_than_the_disk_is_synced_on_the_way(log: DiskLog) -> None:
    put(log, *range(12 * PER_SEGMENT))
    log.sync()
    assert 12 * PER_SEGMENT - 1 in pages(log) and 0 not in pages(log)


def test_a_record_beyond_the_capacity_is_refused(log: DiskLog) -> None:
    put(log, 1)
    log.sync()
    with pytest.raises(DiskFull):
        log.append(header(2), "raw", 5, [bytes(9 * SEGMENT)])
    put(log, 3)
    assert log.sync() == [header(3).name] and pages(log) == {1, 3}
