"""What one folder holds, in RAM, as its manifest tells it.

Written by one thread. Others look names up meanwhile: `entries` changes by single dictionary
operations only.
"""

from collections.abc import Iterator

from expertmesh.actors.state.disk.manifest import Entry, Op
from expertmesh.actors.state.disk.record import Place, aligned
from expertmesh.actors.state.item import Kind, Name

Spot = tuple[int, int]  # segment, offset


def folder_of(segment: int) -> int:
    """Number of the folder that made a segment: its upper half."""
    return segment >> 32


def spot(place: Place) -> Spot:
    return place.segment, place.offset


class Segment:
    """names: what lives in it. live, pinned: bytes on disk of all of it, and of what is pinned.
    end: behind the last record. used: the highest `clock` of a read or write, for eviction."""

    def __init__(self) -> None:
        self.names: set[Name] = set()
        self.live = self.pinned = self.end = self.used = 0


class Tally:
    """Of the items of one kind. nbytes: on disk; raw_bytes: before packing."""

    def __init__(self) -> None:
        self.items = self.nbytes = self.raw_bytes = self.pinned = 0

    def add(self, entry: Entry, sign: int) -> None:
        self.items += sign
        self.nbytes += sign * aligned(entry.place.nbytes)
        self.raw_bytes += sign * entry.raw_bytes
        self.pinned += sign * entry.pinned


class Index:
    """elsewhere: REMOVE and UNPIN of records in other folders, whose own manifests say nothing of
    it until their writer has taken note. sessions: of the entries, those of that kind."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: dict[Name, Entry] = {}
        self.sessions: dict[Name, Entry] = {}
        self.segments: dict[int, Segment] = {}
        self.elsewhere: dict[Spot, Entry] = {}
        self.tallies = {kind: Tally() for kind in Kind}

    def apply(self, entry: Entry) -> None:
        """What the manifest does at this entry. Idempotent."""
        if entry.op is Op.PUT:
            self._put(entry)
        elif entry.op is Op.DROP:
            self.drop(entry.place.segment)
        elif folder_of(entry.place.segment) != self.number:
            before = self.elsewhere.get(spot(entry.place))
            if before is None or before.op is not Op.REMOVE:
                self.elsewhere[spot(entry.place)] = entry
        else:
            self._change(entry)

    def _put(self, entry: Entry) -> None:
        self._leave(self.entries.get(entry.name))
        segment = self.segments.setdefault(entry.place.segment, Segment())
        size = aligned(entry.place.nbytes)
        segment.names.add(entry.name)
        segment.live += size
        segment.pinned += size if entry.pinned else 0
        segment.end = max(segment.end, entry.place.offset + size)
        self._hold(entry)
        self.tallies[entry.name.kind].add(entry, +1)

    def _change(self, entry: Entry) -> None:
        held = self.entries.get(entry.name)
        if held is None or spot(held.place) != spot(entry.place):
            return
        if entry.op is Op.REMOVE:
            self._forget(entry.name)
            return
        pinned = entry.op is Op.PIN
        if pinned != held.pinned:
            size = aligned(held.place.nbytes)
            self.segments[held.place.segment].pinned += size if pinned else -size
            self.tallies[entry.name.kind].pinned += 1 if pinned else -1
            self._hold(held._replace(pinned=pinned))

    def _hold(self, entry: Entry) -> None:
        self.entries[entry.name] = entry
        if entry.name.kind is Kind.SESSION:
            self.sessions[entry.name] = entry

    def _forget(self, name: Name) -> None:
        self._leave(self.entries.pop(name, None))
        self.sessions.pop(name, None)

    def _leave(self, entry: Entry | None) -> None:
        if entry is not None:
            segment = self.segments[entry.place.segment]
            size = aligned(entry.place.nbytes)
            segment.names.discard(entry.name)
            segment.live -= size
            segment.pinned -= size if entry.pinned else 0
            self.tallies[entry.name.kind].add(entry, -1)

    def drop(self, segment: int) -> None:
        """Forgets a segment and all that is in it."""
        held = self.segments.get(segment)
        for name in list(held.names) if held else ():
            self._forget(name)
        self.segments.pop(segment, None)

    def forget_place(self, entry: Entry) -> None:
        """Of a record that is not there although the manifest says so."""
        self._change(entry._replace(op=Op.REMOVE))

    def checkpoint(self) -> Iterator[Entry]:
        yield from self.entries.values()
        yield from self.elsewhere.values()
