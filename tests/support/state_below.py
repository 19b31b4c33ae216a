"""What lies below the devices of a world: a store in memory, or real tiers over one folder."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import StateLayout
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tiers.store import TieredStore
from tests.support.state_store import MemoryStore

DISK_BYTES, SEGMENT_BYTES = 4 << 20, 256 << 10
# Far beyond any load: who waits so long waits for ever.
STALL_S = 20.0


class Below(Protocol):
    """state: what an engine's StateSettings must say of it. threads: whether it works in the
    background, so that who has nothing to do waits."""

    state: dict[str, Any]
    threads: bool

    def open(self, replica: int, layout: StateLayout, wake: Callable[[], None]) -> Store:
        """The store of a replica that has just started."""
        ...

    def lose(self, replica: int) -> None:
        """The replica's process is gone."""
        ...

    def begin(self, rng: random.Random) -> None:
        """Another schedule: other faults."""
        ...

    def tick(self) -> None: ...

    def damage(self, rng: random.Random) -> None:
        """Something that was stored is there no longer, or no longer what it was."""
        ...

    def check(self) -> None:
        """Raises AssertionError where the store itself has noticed what must not be."""
        ...

    def close(self) -> None: ...


class Memory:
    """Both replicas share it, as if it were a disk that never forgets a promise. folder: for old
    pages of running requests, which are on a real one."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.store = MemoryStore(random.Random(seed))
        self.state: dict[str, Any] = {"disk": folder, "disk_bytes": 64 << 20}
        self.threads = False

    def open(self, replica: int, layout: StateLayout, wake: Callable[[], None]) -> Store:
        return self.store

    def lose(self, replica: int) -> None:
        pass

    def begin(self, rng: random.Random) -> None:
        faults = self.store.faults
        faults.delay = rng.choice((0, 1, 5))
        faults.fail, faults.refuse = rng.choice((0, 0, 0.3)), rng.choice((0, 0, 0.3))
        faults.forget = rng.choice((0, 0, 0.1))

    def tick(self) -> None:
        self.store.tick()

    def damage(self, rng: random.Random) -> None:
        self.store.forget(rng.choice((0.1, 0.5, 1.0)))

    def check(self) -> None:
        self.store.check()

    def close(self) -> None:
        pass


class Tiers:
    """Host memory of each replica, and a disk that they share: small, and rotting."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = random.Random(seed)
        self._folder = folder
        self.state: dict[str, Any] = {
            "host_bytes": rng.choice((0, 60_000, 300_000)), "disk": folder, "disk_bytes": 64 << 20,
            "codec": rng.choice(("raw", "lossless")), "checkpoint_tokens": rng.choice((64, 128)),
        }  # fmt: skip
        self.threads = True
        self._stores: dict[int, TieredStore] = {}

    def open(self, replica: int, layout: StateLayout, wake: Callable[[], None]) -> Store:
        disk = DiskLog.open(
            self._folder,
            capacity=DISK_BYTES,
            layout=layout.fingerprint,
            segment_bytes=SEGMENT_BYTES,
        )
        settings = StateSettings(**self.state)
        self._stores[replica] = store = TieredStore(layout, settings, disk=disk, wake=wake)
        return store

    def lose(self, replica: int) -> None:
        self._stores.pop(replica).close()

    def begin(self, rng: random.Random) -> None:
        pass

    def tick(self) -> None:
        pass

    def damage(self, rng: random.Random) -> None:
        """A byte of some segment is another one."""
        files = sorted(each for each in self._folder.rglob("*") if each.is_file())
        files = [each for each in files if each.stat().st_size >= SEGMENT_BYTES // 2]
        if not files:
            return
        with rng.choice(files).open("r+b") as file:
            at = rng.randrange(SEGMENT_BYTES // 2)
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << rng.randrange(8))]))

    def check(self) -> None:
        for store in self._stores.values():
            stats = store.stats()
            assert stats.threads_dead == 0, stats

    def close(self) -> None:
        for replica in list(self._stores):
            self.lose(replica)


def wait_for(events: list[threading.Event]) -> None:
    """Returns when any of them is set; clears them all."""
    for event in events:
        if event.wait(0.02):
            break
    for event in events:
        event.clear()
