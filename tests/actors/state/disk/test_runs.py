"""Records that lie one behind the other are read together, and judged one by one."""

import errno
import random
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.disk.record import ALIGN, HEADER_BYTES, Record
from expertmesh.actors.state.item import Name
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import header, open_log

COUNT = 6  # of one segment, the last longer than a block


def name(number: int) -> Name:
    return header(number).name


def data(number: int) -> bytes:
    return random.Random(number).randbytes(900 * number)


class Counting(SimulatedFiles):
    """reads: of segments. shorten: bytes that are missing from the next of them."""

    reads, shorten = 0, 0

    def read(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        count = super().read(fd, buffers, offset)
        self.reads += 1
        count, self.shorten = max(0, count - self.shorten), 0
        return count


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def files(disk: Disk) -> Counting:
    return Counting(disk)


@pytest.fixture
def log(files: Counting) -> DiskLog:
    log = open_log(files)
    for number in range(COUNT):
        log.append(header(number), "raw", 0, [data(number)])
    log.sync()
    return log


def segment(disk: Disk) -> bytearray:
    (path,) = (path for path in disk.names if path.suffix == ".seg")
    return disk.names[path].data


def place(log: DiskLog, number: int) -> int:
    found = log._library.find(name(number))
    assert found is not None
    return found.entry.place.offset


def intact(record: Record | str, number: int) -> bool:
    return isinstance(record, Record) and (
        record.header == header(number) and bytes(record.payload) == data(number)
    )


def test_neighbours_are_one_read_in_any_order(log: DiskLog, files: Counting) -> None:
    numbers = random.Random(0).sample(range(COUNT), COUNT)
    files.reads = 0
    records = log.read_all([name(number) for number in numbers])
    assert all(map(intact, records, numbers)) and files.reads == 1
    assert log.stats().reads == COUNT


def test_gaps_part_the_reads_and_unknown_names_are_missing(log: DiskLog, files: Counting) -> None:
    numbers = [0, 1, 99, 3, 5]
    files.reads = 0
    records = log.read_all([name(number) for number in numbers])
    assert records[2] == "missing"
    assert all(intact(r, n) for r, n in zip(records, numbers, strict=True) if n != 99)
    assert files.reads == 3  # 0 and 1, 3, 5
    assert log.read_all([]) == []


@pytest.mark.parametrize("at", [3, 100, HEADER_BYTES + 5, HEADER_BYTES + 700])
def test_damage_costs_one_record(log: DiskLog, disk: Disk, at: int) -> None:
    segment(disk)[place(log, 4) + at] ^= 0x10
    records = log.read_all([name(number) for number in range(COUNT)])
    assert records[4] == "corrupt" and not log.has(name(4))
    assert all(intact(records[n], n) for n in range(COUNT) if n != 4)
    assert sum(log.damage.values()) == 1


def test_what_is_swapped_is_found(log: DiskLog, disk: Disk) -> None:
    first, second, bytes_of = place(log, 1), place(log, 2), segment(disk)
    bytes_of[first : first + ALIGN], bytes_of[second : second + ALIGN] = (
        bytes_of[second : second + ALIGN], bytes_of[first : first + ALIGN],
    )  # fmt: skip
    records = log.read_all([name(number) for number in range(COUNT)])
    assert records[1] == records[2] == "corrupt"
    assert all(intact(records[n], n) for n in range(COUNT) if n not in (1, 2))


@pytest.mark.parametrize("missing", [1, 9_000, 1 << 20])
def test_a_short_read_is_made_up_for(log: DiskLog, files: Counting, missing: int) -> None:
    files.shorten = missing
    records = log.read_all([name(number) for number in range(COUNT)])
    assert all(map(intact, records, range(COUNT)))
    assert log.damage == {}


def test_a_device_that_fails_once_costs_nothing() -> None:
    failing = [False]

    def fail(operation: str, path: Path) -> None:
        if failing[0] and operation == "read":
            failing[0] = False
            raise OSError(errno.EIO, "injected", str(path))

    log = open_log(SimulatedFiles(Disk(), fail=fail))
    for number in range(COUNT):
        log.append(header(number), "raw", 0, [data(number)])
    log.sync()
    failing[0] = True
    assert all(map(intact, log.read_all([name(n) for n in range(COUNT)]), range(COUNT)))
    assert not failing[0]


def test_a_device_that_goes_on_failing_is_told_for_each(disk: Disk) -> None:
    def fail(operation: str, path: Path) -> None:
        if operation == "read" and path.suffix == ".seg":
            raise OSError(errno.EIO, "injected", str(path))

    log = open_log(SimulatedFiles(disk))
    for number in range(3):
        log.append(header(number), "raw", 0, [data(number)])
    log.sync()
    log.close()
    log = open_log(SimulatedFiles(disk, fail=fail))
    assert log.read_all([name(number) for number in range(3)]) == ["io"] * 3
    assert log.stats().failures["io"] == 3


def test_sealed_records_have_no_known_digest() -> None:
    disk = Disk()
    for secret in (None, b"a" * 16):
        log = open_log(SimulatedFiles(disk if secret is None else Disk()), secret=secret)
        for number in range(1, 4):
            log.append(header(number), "raw", 0, [data(number)])
        log.sync()
        records = log.read_all([name(number) for number in range(1, 4)])
        assert all(map(intact, records, range(1, 4)))
        for record in records:
            assert isinstance(record, Record) and bool(record.digest) == (secret is None)
