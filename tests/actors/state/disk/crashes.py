"""A workload that is cut off after each of its operations on the disk, in every way at once."""

import random
from collections.abc import Callable
from pathlib import Path

from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import Workload, open_log


class Crashes:
    """points: states of the disk that were opened and read, half of them after a kill and half
    after a power failure. items: those read back, all of them right. evictions: items evicted by
    the log that was cut off.

    files: of the log that is cut off; the one that recovers has an honest disk.
    """

    def __init__(
        self,
        seed: int,
        evicting: bool,
        files: Callable[[Disk, Callable[[str], None]], SimulatedFiles] = SimulatedFiles,
    ) -> None:
        self.points = self.items = self.evictions = 0
        self.workload = Workload(seed)
        self._disk, self._rng = Disk(), random.Random(seed)
        self._evicting, self._segments = evicting, 6 if evicting else 64
        self._files = files

    def run(self, steps: int) -> None:
        """Raises Corrupt or Lost with the operation that was the last."""
        log = open_log(self._files(self._disk, self._after), segments=self._segments)
        for _ in range(steps):
            self.workload.step(log)
        log.close()
        self.evictions = log.stats().evictions

    def _after(self, operation: str) -> None:
        for disk in (self._disk.after_power_failure(self._rng), self._disk.after_kill()):
            self.points += 1
            try:
                log = open_log(SimulatedFiles(disk), segments=self._segments)
                self.items += self.workload.verify(log, self._evicting)
            except AssertionError as error:
                error.add_note(f"cut off after {operation}, point {self.points}")
                raise


def damaged_copy(disk: Disk, path: Path, data: bytes) -> Disk:
    """The disk with other bytes in one file."""
    copy = disk.after_kill()
    copy.names[path].data[:] = data
    return copy
