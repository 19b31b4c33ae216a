"""A process that writes a disk log and is killed, again and again, on real files.

Killing shows what the order of operations is worth in the page cache; what a power failure would
leave is simulated (crashes.py). Forked, so that a life costs milliseconds.
"""

import os
import pickle
import random
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

from expertmesh.actors.state.disk.errors import DiskFailed
from expertmesh.actors.state.disk.files import Files
from tests.actors.state.disk.workload import Workload, open_log

DEADLINE_S = 60.0
MOST_LIFE_S = 0.06
SEGMENTS = 24
MOST_PINNED = 40


def campaign(root: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills as many writers of one folder, each after some milliseconds, and reads everything
    after each. Call it in a process without threads. Raises Corrupt or Lost."""
    rng = random.Random(seed)
    workload, items, steps = Workload(seed), 0, 0
    root.mkdir(parents=True, exist_ok=True)
    diary = root / "diary"
    for life in range(kills):
        diary.write_bytes(b"")
        child = os.fork()
        if not child:
            _live(root, workload, diary)
        if rng.random() < 0.8:  # else while it opens the log
            _await_entry(diary)
        time.sleep(rng.uniform(0.0, MOST_LIFE_S))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            raise RuntimeError(f"the writer of life {life} ended by itself: {status}")
        told = _last(diary)
        if told is not None:
            workload, done = told
            steps += done
        log = open_log(Files(), root, segments=SEGMENTS)
        items += workload.verify(log, evicting=True)
        workload.forget_unacknowledged(log)
        workload.unpin(log, keep=MOST_PINNED)
        log.close()
    return {"kills": kills, "steps": steps, "items_read": items}


def _await_entry(diary: Path) -> None:
    end = time.monotonic() + DEADLINE_S
    while not diary.stat().st_size:
        if time.monotonic() > end:
            raise RuntimeError("the writer has not begun")
        time.sleep(0.001)


def _live(root: Path, workload: Workload, diary: Path) -> None:
    """Until killed. Each promise is in the diary before anything depends on it; the diary is in the
    page cache, which outlives the process."""
    status = 1
    try:
        fd = os.open(diary, os.O_WRONLY | os.O_APPEND)
        steps = 0

        def tell() -> None:
            data = pickle.dumps((workload, steps))
            os.write(fd, struct.pack("<Q", len(data)) + data)

        workload.tell = tell
        log = open_log(Files(), root, segments=SEGMENTS)
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            workload.step(log)
            steps += 1
    except DiskFailed as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(status)


def _last(diary: Path) -> tuple[Workload, int] | None:
    data, at, last = diary.read_bytes(), 0, None
    while at + 8 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 8 + size > len(data):
            break
        last = data[at + 8 : at + 8 + size]
        at += 8 + size
    if last is None:
        return None
    workload, steps = pickle.loads(last)
    return workload, steps


if __name__ == "__main__":
    print(campaign(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
