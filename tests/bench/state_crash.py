"""The disk tier against crashes, damage and refusing devices (goal G3 of the state design).

Power failures are simulated below the file system's interface (any subset of unsynced sectors and
names survives); kills are real ones of a forked writer on real files.
"""

import argparse
import errno
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Header, Kind
from tests.actors.state.disk.crashes import Crashes
from tests.actors.state.disk.damage import KINDS, Patient
from tests.actors.state.disk.faults import OPERATIONS, survive
from tests.actors.state.disk.kills import campaign
from tests.actors.state.disk.workload import Corrupt, Lost, Unnoticed
from tests.bench import machine

LAYOUT = b"layout-of-a-test"
T = TypeVar("T")

# A page of the bundled model, a snapshot of it, a page of K3.
SIZES = (32 << 10, 256 << 10, 1_769_472)
AMOUNT = 64 << 20
ROUNDS = 7


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="tests.bench state_crash", description=__doc__)
    parser.add_argument("--points", type=int, default=10_000, help="states after a cut")
    parser.add_argument("--damages", type=int, default=4_000)
    parser.add_argument("--kills", type=int, default=300, help="real SIGKILLs")
    parser.add_argument("--records", type=int, default=100_000, help="to open again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    options = parser.parse_args(arguments)
    root = Path(tempfile.mkdtemp(prefix="state-crash-", dir=options.folder))
    verdict = Verdict()
    try:
        return {
            "machine": machine.facts(),
            # Forks first: nothing has made a thread yet.
            "kills": verdict.of(lambda: campaign(root / "kills", options.kills, options.seed)),
            "cuts": _cuts(verdict, options.points, options.seed),
            "damage": _damage(verdict, options.damages, options.seed),
            "refused": _refused(verdict, options.seed),
            "reopen": _reopen(root / "reopen", options.records),
            "speed": [_speed(root / "speed", size) for size in SIZES],
            **verdict.counts,
        }
    finally:
        shutil.rmtree(root, ignore_errors=True)


class Verdict:
    """Counts what trials find; the first finding of each kind is told in full."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {"corrupt_reads": 0, "promises_lost": 0, "unnoticed": 0}
        self.counts["findings"] = []

    def of(self, trial: Callable[[], T]) -> T | None:
        """What it returns; None where it found something."""
        try:
            return trial()
        except (Corrupt, Lost, Unnoticed) as error:
            name = {Corrupt: "corrupt_reads", Lost: "promises_lost", Unnoticed: "unnoticed"}
            self.counts[name[type(error)]] += 1
            if len(self.counts["findings"]) < 10:
                self.counts["findings"].append([repr(error), *getattr(error, "__notes__", [])])
            return None


def _cuts(verdict: Verdict, points: int, seed: int) -> dict[str, int]:
    done = {"points": 0, "items_read": 0, "evictions": 0, "runs": 0}
    while done["points"] < points:
        run = done["runs"]
        crashes = Crashes(seed + run, evicting=run % 2 == 1, replicas=1 + (run % 4 > 1))
        verdict.of(partial(crashes.run, steps=100 // len(crashes.workloads)))
        done["points"] += crashes.points
        done["items_read"] += crashes.items
        done["evictions"] += crashes.evictions
        done["runs"] += 1
    return done


def _damage(verdict: Verdict, count: int, seed: int) -> dict[str, int]:
    done = dict.fromkeys(KINDS, 0)
    patient = Patient(seed)
    for number in range(count):
        if number % 200 == 199:
            patient = Patient(seed + number)
        kind = KINDS[number % len(KINDS)]
        verdict.of(partial(patient.trial, kind))
        done[kind] += 1
    return done


def _refused(verdict: Verdict, seed: int) -> dict[str, int]:
    done = {"runs": 0, "faults": 0}
    for operation in OPERATIONS:
        for number in (errno.EIO, errno.ENOSPC):
            for turn in range(10):
                run = partial(survive, operation, number, turn % 2 == 1, seed + turn)
                done["faults"] += verdict.of(run) or 0
                done["runs"] += 1
    return done


def _reopen(root: Path, records: int) -> dict[str, Any]:
    """Seconds to open a log that was closed, and one whose writer was killed."""
    log = _open(root, 4096 * (records + 1) * 2)
    for number in range(records):
        log.append(_header(number), "raw", 64, [b"bytes"])
        if number % 4096 == 4095:
            log.sync()
    log.sync()
    killed = shutil.copytree(root, root.with_name("killed"))
    began = time.perf_counter()
    log.close()
    closing = time.perf_counter() - began
    result: dict[str, Any] = {"records": records, "close_seconds": round(closing, 3)}
    for name, folder in (("after_close", root), ("after_kill", killed)):
        began, busy = time.perf_counter(), time.process_time()
        log = _open(folder, 4096 * (records + 1) * 2)
        result[f"{name}_seconds"] = round(time.perf_counter() - began, 3)
        result[f"{name}_cpu_seconds"] = round(time.process_time() - busy, 3)
        assert len(log.names(Kind.PAGE)) == records
        log.close()
    return result


def _open(root: Path, capacity: int) -> DiskLog:
    return DiskLog.open(root, capacity=max(capacity, 64 << 20), layout=LAYOUT)


def _header(number: int) -> Header:
    key = number.to_bytes(32, "big")
    return Header(key, Kind.PAGE, key, 64 * number, tuple(range(64)), "prefill", LAYOUT)


def _speed(root: Path, size: int) -> dict[str, Any]:
    """Writing with a sync every 16 MB. Reading back: from the page cache in CPU time, and with the
    cache dropped in wall time, each beside plain preads of the same bytes in turn."""
    log = _open(root, 8 * AMOUNT)
    data, count = random.Random(0).randbytes(size), AMOUNT // size
    names = [_header(number).name for number in range(count)]
    began = time.perf_counter()
    for number in range(count):
        log.append(_header(number), "raw", size, [data])
        if number % max(1, (16 << 20) // size) == 0:
            log.sync()
    log.sync()
    write = time.perf_counter() - began
    files = [(path, path.stat().st_size) for path in sorted(root.rglob("*.seg"))]
    buffer = memoryview(bytearray(size + 4096))

    def verified() -> None:
        for name in names:
            assert log.read(name, lambda nbytes: buffer) is not None

    def plain() -> None:
        for path, end in files:
            fd = os.open(path, os.O_RDONLY)
            for offset in range(0, end - size, size):
                os.preadv(fd, [buffer[:size]], offset)
            os.close(fd)

    def drop() -> None:
        for path, _ in files:
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    warm = _turns(time.process_time, verified, plain, lambda: None)
    cold = _turns(time.perf_counter, verified, plain, drop)
    log.close()
    shutil.rmtree(root)
    total, read = size * count / 1e9, sum((end - 1) // size * size for _, end in files) / 1e9
    return {
        "bytes": size,
        "write_GBps": round(total / write, 3),
        **_rates("warm_cpu", total / warm[0], read / warm[1]),
        **_rates("cold_wall", total / cold[0], read / cold[1]),
    }


def _rates(name: str, verified: float, plain: float) -> dict[str, float]:
    return {
        f"{name}_read_GBps": round(verified, 2),
        f"{name}_pread_GBps": round(plain, 2),
        f"{name}_share": round(verified / plain, 3),
    }


def _turns(
    clock: Callable[[], float],
    one: Callable[[], None],
    other: Callable[[], None],
    before: Callable[[], None],
) -> tuple[float, float]:
    """Seconds of each, the better of several in turn: what disturbs can only add to it."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for work, taken in zip((one, other), seconds, strict=True):
            before()
            began = clock()
            work()
            taken.append(clock() - began)
    return min(seconds[0]), min(seconds[1])
