import numpy as np
import pytest

from expertmesh.actors.state.disk import writer
from expertmesh.actors.state.disk.errors import DiskFailed
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Kind
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import LAYOUT, ROOT, header, open_log


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def log(disk: Disk) -> DiskLog:
    return open_log(SimulatedFiles(disk))


def put(log: DiskLog, *numbers: int, kind: Kind = Kind.PAGE, data: bytes = b"bytes") -> None:
    for number in numbers:
        log.append(header(number, kind), "raw", len(data), [data])


def test_there_after_the_sync_and_not_before(log: DiskLog) -> None:
    assert log.append(header(1), "raw", 5, [b"by", b"", b"tes"])
    assert not log.has(header(1).name) and log.read(header(1).name) is None
    assert log.sync() == [header(1).name]
    record = log.read(header(1).name)
    assert record is not None
    assert (record.header, record.codec, record.raw_bytes) == (header(1), "raw", 5)
    assert bytes(record.payload) == b"bytes"
    assert log.sync() == []


def test_there_after_a_restart(disk: Disk) -> None:
    for turn in range(4):
        log = open_log(SimulatedFiles(disk))
        assert sorted(log.names(Kind.PAGE)) == [header(n).name for n in range(turn)]
        put(log, turn)
        log.close()
        log.close()


def test_a_page_is_written_once_and_a_session_replaces(log: DiskLog) -> None:
    put(log, 1)
    assert not log.append(header(1), "raw", 5, [b"bytes"])
    log.sync()
    assert not log.append(header(1), "raw", 5, [b"bytes"])
    for position in (10, 7):
        assert log.append(header(1, Kind.SESSION, position), "raw", 1, [b"%d" % position])
        assert log.sync() == [header(1, Kind.SESSION).name]
    record = log.read(header(1, Kind.SESSION).name)
    assert record is not None and bytes(record.payload) == b"7"
    assert log.positions(Kind.SESSION) == {header(1, Kind.SESSION).name: 7}
    assert log.stats().items == 2


def test_pages_and_snapshots_share_keys(log: DiskLog) -> None:
    put(log, 1, data=b"page")
    put(log, 1, kind=Kind.SNAPSHOT, data=b"snapshot")
    log.sync()
    for kind, data in ((Kind.PAGE, b"page"), (Kind.SNAPSHOT, b"snapshot")):
        record = log.read(header(1, kind).name)
        assert record is not None and bytes(record.payload) == data


def test_removed_stays_removed(log: DiskLog, disk: Disk) -> None:
    put(log, 1, 2, 3)
    log.sync()
    put(log, 4)
    log.remove([header(1).name, header(4).name, header(9).name])
    assert not log.has(header(1).name)
    assert log.sync() == []
    again = open_log(SimulatedFiles(disk.after_kill()))
    assert sorted(again.names(Kind.PAGE)) == [header(2).name, header(3).name]


def test_reads_into_the_callers_buffer(log: DiskLog) -> None:
    put(log, 1, data=bytes(5000))
    log.sync()
    buffers: list[memoryview] = []

    def allocate(nbytes: int) -> memoryview:
        buffers.append(np.full(nbytes + 100, 0xEE, np.uint8).data)
        return buffers[-1]

    record = log.read(header(1).name, allocate)
    assert record is not None and bytes(record.payload) == bytes(5000)
    whole, part = np.asarray(buffers[0]), np.asarray(record.payload)
    assert np.shares_memory(whole, part)
    assert (part.ctypes.data - whole.ctypes.data) % 64 == 0
    assert (whole[-100:] == 0xEE).all()


def test_a_record_larger_than_a_segment_gets_its_own(log: DiskLog) -> None:
    put(log, 1)
    put(log, 2, data=bytes(100_000))
    put(log, 3)
    log.sync()
    assert all(log.read(header(n).name) for n in (1, 2, 3))


def test_says_what_a_read_costs(log: DiskLog) -> None:
    put(log, 1, data=bytes(5000))
    log.sync()
    nbytes = log.nbytes(header(1).name)
    log.read(header(1).name)
    assert nbytes is not None and nbytes > 5000 and log.stats().read_bytes == nbytes
    assert log.nbytes(header(2).name) is None


def test_closed_is_closed(log: DiskLog) -> None:
    log.close()
    for use in (log.sync, log.refresh, lambda: log.read(header(1).name), lambda: put(log, 1)):
        with pytest.raises(DiskFailed, match="closed") as caught:
            use()
        assert caught.value.reason == "closed"


@pytest.mark.parametrize("capacity, segment", [(1 << 12, 0), (1 << 20, 1000), (1 << 20, 1 << 19)])
def test_sizes_that_make_no_sense(capacity: int, segment: int) -> None:
    with pytest.raises(ValueError, match="too few"):
        DiskLog.open(
            ROOT,
            capacity=capacity,
            layout=LAYOUT,
            segment_bytes=segment,
            files=SimulatedFiles(Disk()),
        )


def test_a_session_saved_again_and_again_takes_no_more_room(
    log: DiskLog, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "MIN_ENTRIES", 40)
    for position in range(300):
        log.append(header(1, Kind.SESSION, position), "raw", 1, [bytes(5000)], pinned=True)
        assert log.sync() == [header(1, Kind.SESSION).name]
    files = sorted(path.name for path in disk.names if path.parent.name == "writer-00000001")
    assert sum(name.startswith("index") for name in files) == 2
    assert sum(name.startswith("manifest") for name in files) == 2
    assert sum(name.endswith(".seg") for name in files) <= 62
    again = open_log(SimulatedFiles(disk.after_kill()))
    assert again.positions(Kind.SESSION) == {header(1, Kind.SESSION).name: 299}
    assert again.stats().failures == {}
