"""A disk whose latency is on a clock of its own, and weather for it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from expertmesh.actors.state.disk.record import Record
from expertmesh.actors.state.item import Name
from tests.support.tiers import FakeClock, FakeDisk, broken_device

LATENCIES_S = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
FOR_EVER_S = 1e9


@dataclass
class SlowDisk(FakeDisk):
    """reads and syncs take `latency_s` on `clock`. It remembers no reads, for soaks are long, but
    how many took a second and more."""

    clock: FakeClock = field(default_factory=FakeClock)
    latency_s: float = 0.0
    slow_reads: int = 0

    def read_all(self, names: Sequence[Name]) -> list[Record | str]:
        self.slow_reads += self.latency_s >= 1
        self._wait()
        self._touch_device()
        return [self.records.get(name, "missing") for name in names]

    def sync(self) -> list[Name]:
        self._wait()
        return super().sync()

    def _wait(self) -> None:
        begun = self.clock.now
        while self.clock.now < begun + self.latency_s:
            time.sleep(0.0002)


@dataclass
class Weather:
    """One state of the disk after the other: full, failing, ever slower, standing still."""

    disk: SlowDisk
    seen: list[str] = field(default_factory=list)
    at: int = 0

    @property
    def kinds(self) -> Sequence[str]:
        steps = [f"latency {seconds:g} s" for seconds in LATENCIES_S]
        return ("fine", "full", "fine", "failing", "fine", *steps, "fine", "stalled")

    def change(self) -> None:
        kind = self.kinds[self.at % len(self.kinds)]
        self.at += 1
        if kind not in self.seen:
            self.seen.append(kind)
        self.disk.full = kind == "full"
        self.disk.failing = broken_device() if kind == "failing" else None
        slow = float(kind.split()[1]) if kind.startswith("latency") else 0.0
        self.disk.latency_s = FOR_EVER_S if kind == "stalled" else slow

    def clear(self) -> None:
        self.disk.full, self.disk.failing, self.disk.latency_s = False, None, 0.0
