"""Several writers under one root: each its own folder, all readable by all."""

import random
import threading
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.folder import load, manifest_path
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Kind, Name
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import LAYOUT, ROOT, SEGMENT, header, open_log


class Node:
    """One disk and the locks of all processes that use it."""

    def __init__(self, segments: int = 64) -> None:
        self.disk = Disk()
        self.locks: set[Path] = set()
        self._segments = segments

    def start(self) -> DiskLog:
        files = SimulatedFiles(self.disk)
        files.locks = self.locks
        return open_log(files, segments=self._segments)

    def kill(self, log: DiskLog) -> None:
        """Ends a process: the kernel lets its locks go."""
        del log
        self.locks.clear()


def put(log: DiskLog, *numbers: int, pinned: bool = False, size: int = 3000) -> None:
    for number in numbers:
        log.append(header(number), "raw", 5, [bytes(size)], pinned=pinned)
    log.sync()


def pages(log: DiskLog) -> list[int]:
    return sorted(int.from_bytes(name.key, "big") for name in log.names(Kind.PAGE))


def name(number: int) -> Name:
    return header(number).name


def test_each_writes_its_own_folder_and_reads_all() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1)
    put(two, 2)
    assert (pages(one), pages(two)) == ([1], [2])
    one.refresh()
    two.refresh()
    assert pages(one) == pages(two) == [1, 2]
    assert one.read(name(2)) is not None and two.read(name(1)) is not None
    assert len(node.disk.folders) == 3  # with the root
    assert not two.append(header(1), "raw", 5, [b"bytes"]), "another replica has it"


def test_follows_through_new_generations_and_torn_entries() -> None:
    node = Node()
    one, two = node.start(), node.start()
    path = ROOT / "writer-00000001"
    for number in range(6):
        put(one, number)
        manifest = manifest_path(path, load(SimulatedFiles(node.disk), path, 1).generation)
        data = node.disk.names[manifest].data
        whole = bytes(data)
        del data[-7:]  # as a reader may meet it while it is written
        two.refresh()
        assert pages(two) == list(range(number))
        data[:] = whole
        two.refresh()
        assert pages(two) == list(range(number + 1))
        if number == 3:
            one.close()
            one = node.start()
    assert two.stats().failures.get("corrupt", 0) == 0


def test_an_entry_that_stays_torn_holds_up_no_others() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1)
    put(one, 2)
    (data,) = (
        n.data
        for path, n in node.disk.names.items()
        if path == manifest_path(ROOT / "writer-00000001", 1)
    )
    data[20] ^= 1
    two.refresh()
    two.refresh()
    assert pages(two) == [2] and two.stats().failures == {"corrupt": 1}


def test_a_dead_writers_folder_is_read_and_continued() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1)
    put(two, 2)
    node.kill(two)
    again = node.start()
    assert pages(again) == [1, 2]
    put(again, 3)
    assert len(node.disk.folders) == 3


def test_what_one_removes_is_gone_for_all_and_for_good() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1, 2)
    two.refresh()
    two.remove([name(1)])
    assert not two.has(name(1))
    two.sync()
    assert one.has(name(1)), "not heard of yet"
    three = node.start()
    assert pages(three) == [2]
    one.refresh()
    assert pages(one) == [2]
    one.sync()
    two.refresh()
    put(one, 1)
    two.refresh()
    three.refresh()
    assert pages(two) == pages(three) == [1, 2], "a new copy is not the removed one"


def test_a_segment_that_vanishes_is_a_miss() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1)
    two.refresh()
    for path in [path for path in node.disk.names if path.suffix == ".seg"]:
        del node.disk.names[path]
    assert two.has(name(1)) and two.read(name(1)) is None
    assert not two.has(name(1)) and two.stats().failures == {"vanished": 1, "missing": 1}


def test_pinning_what_another_has_needs_an_own_copy() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1)
    two.refresh()
    assert two.pin([name(1)]) == [name(1)]
    assert two.append(header(1), "raw", 5, [bytes(3000)], pinned=True)
    two.sync()
    assert two.pin([name(1)]) == []
    one.remove([name(1)])
    one.sync()
    assert not one.has(name(1)) and two.has(name(1)), "not heard of: it was written since"


def test_unpinning_reaches_the_writer() -> None:
    node = Node()
    one, two = node.start(), node.start()
    put(one, 1, pinned=True)
    two.refresh()
    two.unpin([name(1)])
    two.sync()
    assert one.stats().pinned == 1
    one.refresh()
    one.sync()
    assert one.stats().pinned == 0


@pytest.mark.parametrize("newer", ["one", "two"])
def test_the_newest_version_of_a_session_is_read(newer: str) -> None:
    node = Node()
    one, two = node.start(), node.start()
    order = [one, two] if newer == "two" else [two, one]
    for log, position in zip(order, (900, 100), strict=True):
        log.refresh()
        log.append(header(1, Kind.SESSION, position), "raw", 5, [b"bytes"])
        log.sync()
    for log in (one, two):
        log.refresh()
        record = log.read(header(1, Kind.SESSION).name)
        assert record is not None and record.header.position == 100
        assert log.positions(Kind.SESSION) == {header(1, Kind.SESSION).name: 100}
    one.remove([header(1, Kind.SESSION).name])
    one.sync()
    two.refresh()
    assert not two.has(header(1, Kind.SESSION).name)


def test_room_is_taken_from_the_dead_first() -> None:
    node = Node(segments=8)
    one, two = node.start(), node.start()
    put(one, *range(20))
    put(two, *range(100, 104))
    node.locks.discard(ROOT / "writer-00000001" / "lock")  # its process has died
    two.refresh()
    put(two, *range(104, 130))
    assert set(range(100, 130)) <= set(pages(two)), "nothing of the living was evicted"
    assert len(set(range(20)) & set(pages(two))) < 20


def test_what_the_dead_have_pinned_is_copied_before_their_room_is_taken() -> None:
    node = Node(segments=8)
    one, two = node.start(), node.start()
    put(one, *range(20))
    put(one, 50, 51, pinned=True)
    put(one, *range(20, 30))
    put(two, 50)
    node.locks.discard(ROOT / "writer-00000001" / "lock")
    for number in range(100, 200):
        put(two, number)
    assert {50, 51} <= set(pages(two)) and not set(range(30)) & set(pages(two))
    assert two.read(name(50)) is not None and two.read(name(51)) is not None
    assert two.stats().pinned == 2


def test_an_old_version_of_a_session_stays_old_when_it_is_copied() -> None:
    node = Node(segments=16)
    one, two = node.start(), node.start()
    for log, position in ((one, 900), (two, 100)):
        log.refresh()
        log.append(header(1, Kind.SESSION, position), "raw", 5, [b"bytes"], pinned=True)
        log.sync()
    put(one, *range(200))
    assert one.stats().evictions > 100
    one.refresh()
    assert one.positions(Kind.SESSION) == {header(1, Kind.SESSION).name: 100}


def test_one_that_has_more_than_a_share_makes_room() -> None:
    node = Node(segments=12)
    one = node.start()
    put(one, *range(120))
    two = node.start()
    for _ in range(12):
        one.refresh()
    put(two, *range(200, 220))
    assert set(range(200, 220)) <= set(pages(two))
    one.refresh()
    assert pages(one)


def test_the_sum_stays_under_the_cap() -> None:
    node = Node(segments=12)
    logs = [node.start() for _ in range(3)]
    for number in range(150):
        log = logs[number % 3]
        log.refresh()
        put(log, number)
        sizes = [len(n.data) for p, n in node.disk.names.items() if p.suffix == ".seg"]
        assert sum(sizes) <= 12 * SEGMENT
    assert all(len(pages(log)) > 5 for log in logs)


def test_readers_meet_no_wrong_byte_while_others_write_and_evict(tmp_path: Path) -> None:
    """On real files, with threads."""

    def start() -> DiskLog:
        return DiskLog.open(tmp_path, capacity=8 * SEGMENT, layout=LAYOUT, segment_bytes=SEGMENT)

    one, two = start(), start()
    wrong: list[int] = []
    stop = threading.Event()

    def read(log: DiskLog) -> None:
        number = 0
        # A pause: two threads that never wait keep the writer from its turn for minutes.
        while not stop.wait(0.0005):
            number = (number + 7) % 120
            record = log.read(name(number))
            if record is not None and bytes(record.payload) != bytes([number]) * 4000:
                wrong.append(number)

    readers = [threading.Thread(target=read, args=(log,)) for log in (one, two)]
    for reader in readers:
        reader.start()
    try:
        for number in range(120):
            one.append(header(number), "raw", 5, [bytes([number]) * 4000])
            if number % 16 == 0:
                one.sync()
                two.refresh()
    finally:
        stop.set()
        for reader in readers:
            reader.join(30.0)
    assert not wrong and one.stats().evictions > 40
    assert set(one.stats().failures) | set(two.stats().failures) <= {"missing", "vanished"}
    one.close()
    two.close()


def test_what_another_has_only_begun_to_store_is_made_to_last_before_we_rely_on_it() -> None:
    node = Node()
    one, two = node.start(), node.start()
    honest = SimulatedFiles.sync

    class Cut(Exception):
        pass

    def cut(self: SimulatedFiles, fd: int) -> None:
        if self._open[fd][0].name.startswith("manifest"):
            raise Cut
        honest(self, fd)

    one.append(header(1), "raw", 5, [b"bytes"])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Cut):
        patch.setattr(SimulatedFiles, "sync", cut)
        one.sync()
    two.refresh()
    assert two.has(name(1)) and not two.append(header(1), "raw", 5, [b"bytes"])
    for seed in range(20):
        disk = node.disk.after_power_failure(random.Random(seed))
        assert open_log(SimulatedFiles(disk)).read(name(1)) is not None


def test_a_change_that_is_written_late_does_not_undo_a_newer_one() -> None:
    """Sessions say when they were changed; the order in which replicas write them is chance."""
    node = Node()
    one, two = node.start(), node.start()
    changed = 1_900_000_000 * 10**9
    for log, version in ((one, changed + 2), (two, changed + 1)):
        log.append(header(1, Kind.SESSION, version), "raw", 5, [b"bytes"])
        log.sync()
    session = header(1, Kind.SESSION).name
    for log in (one, two):
        log.refresh()
        record = log.read(session)
        assert record is not None and record.header.position == changed + 2
        assert log.positions(Kind.SESSION) == {session: changed + 2}
