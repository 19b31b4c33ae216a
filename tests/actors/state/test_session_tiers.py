"""Sessions over the tiers as they are: host memory, the segment log, its threads and its files."""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from expertmesh.actors.state.disk.files import Buffer, Files
from tests.support.session_engine import SessionEngine
from tests.support.state_model import small_model

RUNNER = small_model()
FIRST = [(5 * i + 3) % 64 for i in range(300)]
SECOND = [(7 * i + 1) % 64 for i in range(70)]


@contextmanager
def replica(folder: Path | None, **more: Any) -> Iterator[SessionEngine]:
    server = SessionEngine(RUNNER, folder, pages=64, **more)
    try:
        yield server
    finally:
        server.close()


def second(answer: list[int]) -> list[int]:
    return [*FIRST, *answer, *SECOND]


def test_a_restart(tmp_path: Path) -> None:
    with replica(tmp_path) as server:
        answer, _ = server.turn("1", FIRST, 10, "s")
        server.ask("fork", "s", "uninterrupted")
        ids, _ = server.turn("2", second(answer), 20, "uninterrupted")
        wanted = server.rows("2")
        server.ask("suspend", "s")
    with replica(tmp_path) as server:
        views = server.ask("list").views
        assert views is not None
        assert {view.session_id: view.status for view in views} == {
            "s": "suspended", "uninterrupted": "active",
        }  # fmt: skip
        view = server.ask("show", "s").view
        assert view is not None and view.missing == 0 and set(view.resident) == {"disk"}
        report = server.ask("resume", "s").resumed
        assert report is not None and report.restored_tokens == 309
        assert report.tier == "disk" and report.verify_ms > 0
        assert server.turn("2", second(answer), 20, "s")[0] == ids
        assert server.rows("2") == wanted
        assert server.engine.stats().recomputed_tokens == 0


def test_two_replicas_of_one_folder(tmp_path: Path) -> None:
    with replica(tmp_path) as one, replica(tmp_path) as two:
        answer, _ = one.turn("1", FIRST, 10, "s")
        one.ask("fork", "s", "uninterrupted")
        one.ask("suspend", "s")
        ids, cached = two.turn("2", second(answer), 20, "s")
        assert cached == 309
        assert one.turn("2", second(answer), 20, "uninterrupted")[0] == ids
        assert two.rows("2") == one.rows("2")
        two.ask("suspend", "s")
        view = one.ask("show", "s").view  # what the other has made of it
        assert view is not None and view.tokens == len(second(answer)) + 20
        third = [*second(answer), *ids, 5]
        assert one.turn("3", third, 5, "s")[1] == len(third) - 2
        assert two.ask("delete", "s").deleted == "s"
        views = one.ask("list").views
        assert views is not None and [view.session_id for view in views] == ["uninterrupted"]


@pytest.mark.parametrize("pages", [0, 40])
def test_host_memory_alone(pages: int) -> None:
    with replica(None) as server:
        answer, _ = server.turn("1", FIRST, 10, "s")
        server.engine.cache.evict(pages=pages)
        ids, cached = server.turn("2", second(answer), 20, "s")
        assert cached == 309 and len(ids) == 20


def test_a_folder_that_is_gone_is_no_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    with replica(tmp_path / "file") as server:
        assert server.store is not None and not server.store.durable
        server.turn("1", FIRST, 10, "s")
        with pytest.raises(AssertionError, match="no state on disk"):
            server.ask("suspend", "s")
    assert "state is not kept on disk" in caplog.text


def test_what_was_removed_is_written_again_or_told(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with replica(folder) as server:
        server.turn("1", FIRST, 10, "s")
        server.ask("suspend", "s")
        shutil.rmtree(folder)
        view = server.ask("suspend", "s") and server.ask("show", "s").view
        assert view is not None and view.status == "suspended" and view.missing == 0
        assert view.resident["disk"] >= view.resident["hot"] > 0
        shutil.rmtree(folder)
    with replica(folder) as server:
        assert server.ask("list").views == []
    shutil.rmtree(folder)
    with replica(folder) as server:
        server.turn("1", FIRST, 10, "s")
        server.ask("suspend", "s")
        shutil.rmtree(folder)
        server.ask("suspend", "s")
    with replica(folder) as server:
        report = server.ask("resume", "s").resumed
        assert report is not None and report.restored_tokens == 309


def test_a_damaged_state_is_called_that(tmp_path: Path) -> None:
    with replica(tmp_path) as server:
        server.turn("1", FIRST, 10, "s")
        server.ask("suspend", "s")
    (segment,) = tmp_path.glob("*/*.seg")
    data = bytearray(segment.read_bytes())
    data[1000] ^= 1
    segment.write_bytes(data)
    with replica(tmp_path) as server:
        for _ in range(2):
            report = server.ask("resume", "s").resumed
            assert report is not None and report.restored_tokens == 0
            assert "(corrupt)" in report.reason


def test_a_failing_disk_leaves_sessions_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def write(self: Files, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        raise OSError(errno.EIO, "injected")

    with replica(tmp_path) as server:
        monkeypatch.setattr(Files, "write", write)
        for name in ("1", "2", "3", "4", "5"):
            answer, _ = server.turn(name, FIRST, 10, name)
        assert "not saved" not in caplog.text and "in memory only" in caplog.text
        server.engine.cache.evict(pages=40)
        assert server.turn("6", second(answer), 20, "5")[1] == 309
        with pytest.raises(AssertionError, match="not suspended"):
            server.ask("suspend", "5")
        view = server.ask("show", "5").view
        assert view is not None and view.status == "active" and "disk" not in view.resident
    assert "closed without a sync" in caplog.text
