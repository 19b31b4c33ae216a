"""What changes on the disk, and what the disk refuses, is a counted miss or an error."""

import errno
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.errors import DiskFailed, DiskFull
from expertmesh.actors.state.disk.log import FULL_PAUSE_S, DiskLog
from expertmesh.actors.state.item import Kind
from tests.actors.state.disk.damage import KINDS, Patient
from tests.actors.state.disk.faults import OPERATIONS, Fault, survive
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import LAYOUT, ROOT, SEGMENT, Workload, header, open_log

WAIT_S = 30.0


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_a_miss_with_a_counter(kind: str) -> None:
    patient = Patient(seed=3)
    for _ in range(12):
        patient.trial(kind)


def test_a_damaged_page_is_written_again_and_stays_gone_until_then() -> None:
    disk = Disk()
    log = open_log(SimulatedFiles(disk))
    log.append(header(1), "raw", 5, [b"bytes"])
    log.sync()
    (segment,) = (path for path in disk.names if path.suffix == ".seg")
    disk.names[segment].data[100] ^= 1
    assert log.has(header(1).name) and log.read(header(1).name) is None
    assert not log.has(header(1).name) and log.read(header(1).name) is None
    assert log.damage == {"header": 1} and log.why(header(1).name) == "corrupt"
    log.sync()
    assert not open_log(SimulatedFiles(disk.after_kill())).has(header(1).name)
    assert log.append(header(1), "raw", 5, [b"bytes"])
    log.sync()
    assert log.read(header(1).name) is not None


def test_another_secret_is_a_miss_and_deletes_nothing() -> None:
    disk = Disk()
    for secret, found in ((b"a" * 16, False), (b"b" * 16, False), (None, False), (b"a" * 16, True)):
        log = open_log(SimulatedFiles(disk), secret=secret)
        assert (log.read(header(1).name) is not None) == found
        if secret == b"a" * 16 and not found:
            log.append(header(1), "raw", 5, [b"bytes"])
        log.close()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["eio", "enospc"])
@pytest.mark.parametrize("evicting", [False, True])
def test_refused_operations_cost_no_promise(operation: str, number: int, evicting: bool) -> None:
    survive(operation, number, evicting, seed=1)


def test_what_is_sealed_is_not_damaged() -> None:
    disk = Disk()
    log = open_log(SimulatedFiles(disk), secret=b"a" * 16)
    log.append(header(1), "raw", 5, [b"bytes"])
    log.close()
    log = open_log(SimulatedFiles(disk))
    assert log.read(header(1).name) is None and log.why(header(1).name) == "sealed"
    assert log.damage == {} and log.stats().failures == {"sealed": 1, "missing": 1}


def test_a_damaged_folder_is_told_of_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    log = open_log(SimulatedFiles(disk))
    for number in range(3):
        log.append(header(number), "raw", 5, [b"bytes"])
    log.sync()
    (manifest,) = (path for path in disk.names if path.name.startswith("manifest"))
    disk.names[manifest].data[10] ^= 1
    assert not caplog.records
    assert len(open_log(SimulatedFiles(disk.after_kill())).names(Kind.PAGE)) == 2
    (record,) = caplog.records
    assert "1 damaged and 0 unfinished entries, 0 records missing" in record.message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_by_any_name_is_full(number: int) -> None:
    log = open_log(SimulatedFiles(Disk(), fail=Fault("allocate", number, 1, 2)))
    with pytest.raises(DiskFull):
        log.append(header(1), "raw", 5, [b"bytes"])
    assert log.stats().read_only == "full"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["enospc", "eio"])
def test_closing_never_fails(number: int, caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault("write", number, 1, 10**9)
    fault.armed = False
    log = open_log(SimulatedFiles(Disk(), fail=fault))
    log.append(header(1), "raw", 5, [b"bytes"])
    fault.armed = True
    log.close()
    log.close()
    assert fault.injected and "closed without a sync" in caplog.text


def test_a_folder_that_cannot_be_used_says_so() -> None:
    with pytest.raises(DiskFailed, match="injected") as caught:
        open_log(SimulatedFiles(Disk(), fail=Fault("make_folder", errno.EACCES, 1, 1)))
    assert caught.value.reason == "io"


def test_full_evicts_one_segment_then_refuses_for_a_while() -> None:
    now = [0.0]
    fault = Fault("allocate", errno.ENOSPC, 5, 10**9)
    log = DiskLog.open(
        ROOT,
        capacity=64 * SEGMENT,
        layout=LAYOUT,
        segment_bytes=SEGMENT,
        files=SimulatedFiles(Disk(), fail=fault),
        clock=lambda: now[0],
    )
    number = 0
    with pytest.raises(DiskFull):
        while True:
            log.append(header(number), "raw", 5, [bytes(5000)])
            log.sync()
            number += 1
    assert log.stats().read_only == "full" and log.stats().failures == {"full": 1}
    kept, tried = len(log.names(Kind.PAGE)), fault.injected
    assert 0 < kept < number and tried == 2
    with pytest.raises(DiskFull, match="a moment ago"):
        log.append(header(number), "raw", 5, [bytes(5000)])
    assert fault.injected == tried
    now[0] += FULL_PAUSE_S
    with pytest.raises(DiskFull):
        log.append(header(number), "raw", 5, [bytes(5000)])
    assert fault.injected == tried + 2 and 0 < len(log.names(Kind.PAGE)) < kept
    now[0] += FULL_PAUSE_S
    fault.last = 0
    assert log.append(header(number), "raw", 5, [bytes(5000)])
    assert log.stats().read_only == "" and log.sync() == [header(number).name]


class Small:
    """A disk with so many bytes, less than the log's cap: others fill it."""

    def __init__(self, disk: Disk, size: int) -> None:
        self.disk, self.size = disk, size
        self.refused = 0

    def __call__(self, operation: str, path: Path) -> None:
        used = sum(len(inode.data) for inode in self.disk.names.values())
        room = SEGMENT if operation == "allocate" else 4096
        if operation in ("allocate", "write", "create") and used + room > self.size:
            self.refused += 1
            raise OSError(errno.ENOSPC, "injected", str(path))


@pytest.mark.parametrize("size", [4, 5, 6, 7])
def test_a_disk_smaller_than_the_cap_goes_on_storing(size: int) -> None:
    """Whichever write it is that finds no room, of records or of the manifest."""
    workload, disk = Workload(size, pin_share=0.05), Disk()
    small = Small(disk, size * SEGMENT + 2000 * size)
    log = open_log(SimulatedFiles(disk, fail=small))
    newest = []
    for _ in range(600):
        with suppress(DiskFailed):
            workload.step(log)
        pages = (name for name in workload.promised if name.kind is Kind.PAGE)
        newest.append(max(pages, default=None))
    assert small.refused > 3 and len(set(newest[-200:])) > 5
    assert workload.verify(log, evicting=True) > 5
    workload.verify(open_log(SimulatedFiles(disk.after_kill())), evicting=True)


def test_a_sync_that_hangs_blocks_no_reader() -> None:
    released, entered = threading.Event(), threading.Event()

    def stall(operation: str, path: Path) -> None:
        if operation == "sync" and stalling:
            entered.set()
            assert released.wait(WAIT_S)

    stalling = False
    log = open_log(SimulatedFiles(Disk(), fail=stall))
    log.append(header(1), "raw", 5, [b"bytes"])
    log.sync()
    stalling = True
    log.append(header(2), "raw", 5, [b"bytes"])
    done: list[object] = []
    writer = threading.Thread(target=lambda: done.extend(log.sync()))
    writer.start()
    try:
        assert entered.wait(WAIT_S)
        assert log.read(header(1).name) is not None
        assert log.read(header(2).name) is None and not log.has(header(2).name)
        assert log.stats().items == 1 and log.names(Kind.PAGE) == [header(1).name]
    finally:
        released.set()
        writer.join(WAIT_S)
    assert done == [header(2).name]
