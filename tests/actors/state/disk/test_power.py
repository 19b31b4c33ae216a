"""Every promise holds after a power failure or a kill at any operation (kv-state 3.8, goal G3)."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from expertmesh.actors.state.disk import log as log_module
from expertmesh.actors.state.disk import record
from tests.actors.state.disk.crashes import APART, Crashes
from tests.actors.state.disk.simulated import Disk, SimulatedFiles
from tests.actors.state.disk.workload import Corrupt, Lost, Workload, open_log


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_cut_off_at_every_operation(seed: int, evicting: bool) -> None:
    crashes = Crashes(seed, evicting)
    crashes.run(steps=60)
    assert crashes.points > 50 and crashes.items > 100
    assert crashes.evictions > 0 or not evicting


@pytest.mark.parametrize("evicting", [False, True])
def test_replicas_that_are_cut_off_together(evicting: bool) -> None:
    crashes = Crashes(0, evicting, replicas=2)
    crashes.run(steps=40)
    assert crashes.points > 100 and (crashes.evictions > 0 or not evicting)


def test_cut_off_again_while_it_recovers() -> None:
    workload, disk, rng = Workload(5), Disk(), random.Random(5)
    log = open_log(SimulatedFiles(disk))
    for _ in range(60):
        workload.step(log)
    points = 0

    def after(operation: str) -> None:
        nonlocal points
        points += 1
        workload.verify(open_log(SimulatedFiles(again.after_power_failure(rng))))

    for _ in range(20):
        again = disk.after_power_failure(rng)
        workload.verify(open_log(SimulatedFiles(again, after)))
    assert points > 60


@pytest.mark.parametrize("evicting", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_goes_on_where_it_was_cut_off(replicas: int, evicting: bool) -> None:
    """Twelve lives of one disk, each ended by a power failure. What a replica has left that does
    not come back in the next life is continued by the other one."""
    lives(seed=6, count=12, replicas=replicas, evicting=evicting)


def lives(seed: int, count: int, replicas: int, evicting: bool) -> None:
    workloads = [Workload(seed + i, first=APART * i) for i in range(replicas)]
    disk, rng = Disk(), random.Random(seed)
    for _ in range(count):
        locks: set[Path] = set()
        logs = []
        for _ in range(rng.randint(1, replicas)):
            files = SimulatedFiles(disk)
            files.locks = locks
            logs.append(open_log(files, segments=8 if evicting else 64))
        for number, workload in enumerate(workloads):
            log = logs[number % len(logs)]
            workload.peers = [] if len(logs) > 1 else [w for w in workloads if w is not workload]
            workload.verify(log, evicting)
            workload.forget_unacknowledged(log)
        for _ in range(rng.randrange(40)):
            for number, workload in enumerate(workloads):
                workload.step(logs[number % len(logs)])
            rng.choice(logs).refresh()
        disk = disk.after_power_failure(rng)
    assert all(workload.promised for workload in workloads)


class Lying(SimulatedFiles):
    """Says that it has synced files whose names contain `about`, or folders, and has not."""

    def __init__(self, disk: Disk, after: Callable[[str], None], *, about: str) -> None:
        super().__init__(disk, after)
        self._about = about

    def sync(self, fd: int) -> None:
        if self._about not in self._open[fd][0].name:
            super().sync(fd)

    def sync_folder(self, path: Path) -> None:
        if self._about != "folder":
            super().sync_folder(path)


@pytest.mark.parametrize("what", [".seg", "manifest", "folder"])
def test_the_check_notices_a_missing_sync(what: str) -> None:
    """What a disk that lies loses is noticed, and still it never returns a wrong byte."""
    with pytest.raises(Lost):
        for seed in range(20):
            Crashes(seed, evicting=False, files=partial(Lying, about=what)).run(steps=60)


def test_the_check_notices_an_eviction_of_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    def evict(self: log_module.DiskLog) -> bool:
        found = log_module.victim(self._library.writers)
        if found is not None:
            found.writer.drop(found.segment)
        return found is not None

    monkeypatch.setattr(log_module.DiskLog, "_evict", evict)
    with pytest.raises(Lost):
        for seed in range(20):
            Crashes(seed, evicting=True).run(steps=60)


class Anything:
    """A digest that is equal to any other."""

    def __ne__(self, other: object) -> bool:
        return False


def test_the_check_notices_an_unverified_read(monkeypatch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(xxh3_128=xxhash.xxh3_128, xxh3_128_digest=lambda data: Anything())
    monkeypatch.setattr(record, "xxhash", blind)
    found = set()
    for seed in range(20):
        try:
            Crashes(seed, evicting=False, files=partial(Lying, about=".seg")).run(steps=60)
        except AssertionError as error:
            found.add(type(error))
    assert Corrupt in found
