import threading
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.handles import MOST, Handles
from tests.actors.state.disk.simulated import Disk, SimulatedFiles

PATHS = [Path(f"/store/{number}.seg") for number in range(MOST + 4)]


@pytest.fixture
def files() -> SimulatedFiles:
    files = SimulatedFiles(Disk())
    for path in PATHS:
        files.close(files.create(path))
    return files


def opened(files: SimulatedFiles) -> int:
    return len(files._open)


def test_a_segment_is_opened_once(files: SimulatedFiles) -> None:
    handles = Handles(files)
    first = handles.acquire(0, PATHS[0])
    handles.release(first)
    assert handles.acquire(0, PATHS[0]) is first and opened(files) == 1


def test_what_was_used_longest_ago_is_closed(files: SimulatedFiles) -> None:
    handles = Handles(files)
    for segment, path in enumerate(PATHS):
        handles.release(handles.acquire(segment, path))
        handles.release(handles.acquire(0, PATHS[0]))
    assert opened(files) == MOST
    before = files._next
    handles.release(handles.acquire(0, PATHS[0]))
    assert files._next == before, "still open"


def test_nothing_is_closed_under_a_reader(files: SimulatedFiles) -> None:
    handles = Handles(files)
    handle = handles.acquire(0, PATHS[0])
    handles.keep(set())
    assert files.read(handle.fd, [memoryview(bytearray(4))], 0) == 0
    other = handles.acquire(0, PATHS[0])
    assert other is not handle
    handles.release(handle)
    handles.close()
    assert opened(files) == 1
    handles.release(other)
    assert opened(files) == 0
    handles.release(handles.acquire(0, PATHS[0]))
    assert opened(files) == 0, "closed"


def test_threads_that_open_the_same_segment_at_once(files: SimulatedFiles) -> None:
    handles, barrier = Handles(files), threading.Barrier(4, timeout=30.0)
    opening = files.open

    def meet(path: Path) -> int:
        barrier.wait()
        return opening(path)

    files.open = meet  # type: ignore[method-assign]
    got = []

    def use() -> None:
        handle = handles.acquire(0, PATHS[0])
        got.append(handle.fd)
        handles.release(handle)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert len(set(got)) == 4 and opened(files) == 1


def test_what_cannot_be_opened_leaves_nothing(files: SimulatedFiles) -> None:
    handles = Handles(files)
    with pytest.raises(FileNotFoundError):
        handles.acquire(0, Path("/store/nothing"))
    handles.close()
    assert opened(files) == 0
