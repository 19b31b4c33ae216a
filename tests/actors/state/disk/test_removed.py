"""Somebody removes files while a log is open: nothing without a name counts as stored."""

import shutil
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.errors import DiskFailed
from expertmesh.actors.state.disk.files import Files
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Kind
from tests.actors.state.disk.workload import check_record, header, open_log, payload

FOLDER = "writer-00000001"
KINDS = ("root", "folder", "content", "lock", "manifest", "segment")


def put(log: DiskLog, number: int) -> None:
    data = payload(header(number))
    log.append(header(number), "raw", len(data), [data])


def remove(root: Path, kind: str) -> None:
    if kind in ("root", "folder"):
        shutil.rmtree(root if kind == "root" else root / FOLDER)
        return
    names = {"content": "*", "lock": "lock", "manifest": "manifest-*", "segment": "*.seg"}
    for path in list((root / FOLDER).glob(names[kind])):
        path.unlink()


@pytest.mark.parametrize("when", ["before", "after", "idle"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_sync_fails_and_then_it_goes_on(tmp_path: Path, kind: str, when: str) -> None:
    root = tmp_path / "state"
    log = open_log(Files(), root)
    put(log, 1)
    assert log.sync() == [header(1).name]
    if when == "before":
        put(log, 2)
    remove(root, kind)
    if when == "after":
        put(log, 2)
    with pytest.raises(DiskFailed, match="removed") as caught:
        log.sync()
    assert caught.value.reason == "io"
    gone = kind not in ("lock", "manifest")
    assert log.has(header(1).name) is not gone and not log.has(header(2).name)
    assert log.pin([header(1).name]) == ([header(1).name] if gone else [])
    for number in (1, 2):
        put(log, number)
    log.sync()
    assert log.stats().failures["io"] == 1
    assert check_record(log, header(1).name) == check_record(log, header(2).name) - 64 == 64
    log.close()
    again = open_log(Files(), root)
    assert sorted(again.names(Kind.PAGE)) == [header(1).name, header(2).name]
    assert check_record(again, header(2).name) == 128
    again.close()


def test_a_look_finds_it_too(tmp_path: Path) -> None:
    root = tmp_path / "state"
    log = open_log(Files(), root)
    put(log, 1)
    log.sync()
    remove(root, "root")
    log.refresh()
    assert not log.has(header(1).name)
    with pytest.raises(DiskFailed, match="removed"):
        log.sync()
    assert log.sync() == []
    log.close()


def test_another_process_may_have_the_folder_by_then(tmp_path: Path) -> None:
    root = tmp_path / "state"
    one = open_log(Files(), root)
    put(one, 1)
    one.sync()
    remove(root, "root")
    two = open_log(Files(), root)
    put(two, 2)
    assert two.sync() == [header(2).name]
    with pytest.raises(DiskFailed, match="another process"):
        one.sync()
    for _ in range(2):
        with pytest.raises(DiskFailed, match="another process") as caught:
            put(one, 3)
        assert caught.value.reason == "busy" and one.names(Kind.PAGE) == []
    assert check_record(two, header(2).name) == 128
    put(two, 4)
    assert two.sync() == [header(4).name]
    one.close()
    two.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_closing_tells_of_it(
    tmp_path: Path, replaced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "state"
    log = open_log(Files(), root)
    put(log, 1)
    remove(root, "root")
    if replaced:
        root.write_text("a file")
        with pytest.raises(DiskFailed):
            log.sync()
        with pytest.raises(DiskFailed):
            put(log, 2)
    log.close()
    assert replaced or "closed without a sync" in caplog.text
