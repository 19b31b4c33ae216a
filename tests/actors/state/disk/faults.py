"""A disk that refuses some operation for a while."""

import errno
import random
from pathlib import Path

from expertmesh.actors.state.disk.errors import DiskFailed
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import Unnoticed, Workload, open_log

WRITES = ("create", "allocate", "write", "sync", "sync_folder", "rename", "unlink", "truncate")
READS = ("open", "read", "names", "folders", "allocated", "lock")
OPERATIONS = WRITES + READS


class Fault:
    """Refuses an operation from its `first` to its `last` time, while armed."""

    def __init__(self, operation: str, number: int, first: int, last: int) -> None:
        self.operation, self.number = operation, number
        self.first, self.last = first, last
        self.seen = self.injected = 0
        self.armed = True

    def __call__(self, operation: str, path: Path) -> None:
        if self.armed and operation == self.operation:
            self.seen += 1
            if self.first <= self.seen <= self.last:
                self.injected += 1
                raise OSError(self.number, "injected", str(path))


def survive(operation: str, number: int, evicting: bool, seed: int) -> int:
    """Times that an operation was refused with an error number while a workload went on.

    Raises Corrupt or Lost where that cost a promise: at once, or when the power failed before or
    after the disk had recovered; Unnoticed where nothing told of it. Without room one segment is
    evicted, whose pinned part is copied on.
    """
    rng = random.Random(seed)
    first = rng.randrange(1, 9)
    fault = Fault(operation, number, first, first + rng.randrange(4))
    workload, disk = Workload(seed), Disk()
    segments = 6 if evicting else 64
    evicting |= number == errno.ENOSPC
    fault.armed = False
    log = open_log(SimulatedFiles(disk, fail=fault), segments=segments)

    def cut_off() -> None:
        later = open_log(SimulatedFiles(disk.after_power_failure(rng)), segments=segments)
        workload.verify(later, evicting)

    fault.armed, failures = True, 0
    for _ in range(60):
        try:
            workload.step(log)
        except DiskFailed:
            failures += 1
            cut_off()
    fault.armed = False
    workload.verify(log, evicting)
    cut_off()
    stats = log.stats()
    if fault.injected and not (
        failures + workload.refused + stats.evictions + stats.failures.get("io", 0)
    ):
        raise Unnoticed(f"{operation} was refused and nothing told of it")
    return fault.injected
