"""Bytes that change on a disk while nobody looks, and what must be noticed of it."""

import random
from dataclasses import dataclass, field

from expertmesh.actors.state.disk.folder import index_path, load, manifest_path, segment_path
from expertmesh.actors.state.disk.manifest import ENTRY_BYTES, Entry, unpack
from expertmesh.actors.state.disk.record import HEADER_BYTES
from expertmesh.actors.state.item import Name
from tests.actors.state.disk.simulated import SECTOR, Disk, SimulatedFiles
from tests.actors.state.disk.workload import (
    ROOT,
    Corrupt,
    Lost,
    Unnoticed,
    Workload,
    check_record,
    open_log,
)

FOLDER = ROOT / "writer-00000001"
KINDS = ("header", "body", "sector", "truncated", "swapped", "payloads", "manifest", "index")


@dataclass
class Damage:
    """victims: what must be a miss now. loose: what may be, or may be as it was before."""

    disk: Disk
    victims: set[Name] = field(default_factory=set)
    loose: set[Name] = field(default_factory=set)


class Patient:
    """A disk with what a workload has left on it, to be damaged again and again."""

    def __init__(self, seed: int, steps: int = 60) -> None:
        self.workload = Workload(seed)
        self._rng = random.Random(seed)
        self._disk = Disk()
        log = open_log(SimulatedFiles(self._disk))
        for _ in range(steps):
            self.workload.step(log)
        self.workload.sync(log)
        log.close()
        log = open_log(SimulatedFiles(self._disk))
        for _ in range(steps):
            self.workload.step(log)
        self.workload.sync(log)
        state = load(SimulatedFiles(self._disk), FOLDER, 1)
        self._generation = state.generation
        self._entries = list(state.index.entries.values())
        self._large = [e for e in self._entries if e.place.nbytes > HEADER_BYTES]

    def trial(self, kind: str) -> None:
        """Damages something of a kind, opens the log and reads everything. Raises Corrupt where a
        damaged item is served, Lost where the damage took an undamaged one along, Unnoticed."""
        damage: Damage = getattr(self, f"_{kind}")()
        log = open_log(SimulatedFiles(damage.disk))
        positions = {name: check_record(log, name) for name in self.workload.promised}
        served = [name for name in damage.victims if positions.get(name) is not None]
        if served:
            raise Corrupt(f"{served} of {kind}")
        for name in self.workload.promised.keys() - damage.victims - damage.loose:
            if positions[name] != self.workload.promised[name]:
                raise Lost(f"{name} by {kind} of something else")
        failures = log.stats().failures
        if not failures.keys() & {"corrupt", "missing", "torn"}:
            raise Unnoticed(f"{kind} was not counted")

    def _pick(self, count: int = 1) -> list[Entry]:
        return self._rng.sample(self._large, count)

    def _edit(self, entry: Entry) -> tuple[Disk, bytearray]:
        disk = self._disk.after_kill()
        return disk, disk.names[segment_path(FOLDER, entry.place.segment)].data

    def _flip(self, first: int, last: int | None) -> Damage:
        (entry,) = self._pick()
        disk, data = self._edit(entry)
        at = entry.place.offset + self._rng.randrange(first, last or entry.place.nbytes)
        data[at] ^= 1 << self._rng.randrange(8)
        return Damage(disk, {entry.name})

    def _header(self) -> Damage:
        return self._flip(0, HEADER_BYTES)

    def _body(self) -> Damage:
        return self._flip(HEADER_BYTES, None)

    def _sector(self) -> Damage:
        """Zeros, as a device may return for what it has lost."""
        (entry,) = self._pick()
        disk, data = self._edit(entry)
        data[entry.place.offset : entry.place.offset + SECTOR] = bytes(SECTOR)
        return Damage(disk, {entry.name})

    def _truncated(self) -> Damage:
        (entry,) = self._pick()
        disk, data = self._edit(entry)
        cut = entry.place.offset + self._rng.randrange(entry.place.nbytes)
        del data[cut:]
        gone = {
            other.name
            for other in self._entries
            if other.place.segment == entry.place.segment
            and other.place.offset + other.place.nbytes > cut
        }
        return Damage(disk, gone)

    def _swapped(self) -> Damage:
        """A whole record, intact, where another one belongs."""
        one, other = self._pick(2)
        disk, data = self._edit(other)
        source = disk.names[segment_path(FOLDER, one.place.segment)].data
        record = bytes(source[one.place.offset : one.place.offset + one.place.nbytes])
        room = -(-other.place.nbytes // 4096) * 4096
        data[other.place.offset : other.place.offset + min(room, len(record))] = record[:room]
        return Damage(disk, {other.name})

    def _payloads(self) -> Damage:
        """The right header before another item's bytes."""
        one, other = self._pick(2)
        disk, data = self._edit(other)
        source = disk.names[segment_path(FOLDER, one.place.segment)].data
        size = min(one.place.nbytes, other.place.nbytes) - HEADER_BYTES
        start, target = one.place.offset + HEADER_BYTES, other.place.offset + HEADER_BYTES
        if source[start : start + size] == data[target : target + size]:
            return self._payloads()  # a page and a snapshot of the same tokens without bytes
        data[target : target + size] = bytes(source[start : start + size])
        return Damage(disk, {other.name})

    def _manifest(self) -> Damage:
        disk = self._disk.after_kill()
        data = disk.names[manifest_path(FOLDER, self._generation)].data
        at = self._rng.randrange(len(data))
        slot = at // ENTRY_BYTES * ENTRY_BYTES
        ((_, entry),) = unpack(bytes(data[slot : slot + ENTRY_BYTES]), None)
        data[at] ^= 1 << self._rng.randrange(8)
        assert entry is not None
        return Damage(disk, loose={entry.name})

    def _index(self) -> Damage:
        """The generation before is still there, and nothing is lost."""
        disk = self._disk.after_kill()
        data = disk.names[index_path(FOLDER, self._generation)].data
        data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        return Damage(disk)
