"""A workload that is cut off after each of its operations on the disk, in every way at once."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import Workload, open_log

Tap = Callable[[str], None]
APART = 1 << 20


class Crashes:
    """points: states of the disk that were opened and read, half of them after a kill and half
    after a power failure. items: those read back, all of them right. evictions: items evicted by
    the logs that were cut off.

    replicas: how many write, all cut off at once; the one that recovers reads what all have left.
    files: of those that are cut off; the one that recovers has an honest disk.
    """

    def __init__(
        self,
        seed: int,
        evicting: bool,
        replicas: int = 1,
        files: Callable[[Disk, Tap], SimulatedFiles] = SimulatedFiles,
    ) -> None:
        self.points = self.items = self.evictions = 0
        self.workloads = [Workload(seed + i, first=APART * i) for i in range(replicas)]
        self._disk, self._rng = Disk(), random.Random(seed)
        self._evicting, self._segments = evicting, 6 * replicas if evicting else 64
        self._files = files

    def run(self, steps: int) -> None:
        """Raises Corrupt or Lost with the operation that was the last."""
        locks: set[Path] = set()
        logs = []
        for _ in self.workloads:
            files = self._files(self._disk, self._after)
            files.locks = locks
            logs.append(open_log(files, segments=self._segments))
        for _ in range(steps):
            for workload, log in zip(self.workloads, logs, strict=True):
                workload.step(log)
                if len(logs) > 1 and self._rng.random() < 0.2:
                    log.refresh()
        for log in logs:
            log.close()
            self.evictions += log.stats().evictions

    def _after(self, operation: str) -> None:
        for disk in (self._disk.after_power_failure(self._rng), self._disk.after_kill()):
            self.points += 1
            try:
                log = open_log(SimulatedFiles(disk), segments=self._segments)
                for workload in self.workloads:
                    self.items += workload.verify(log, self._evicting)
            except AssertionError as error:
                error.add_note(f"cut off after {operation}, point {self.points}")
                raise
