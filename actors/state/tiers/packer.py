"""Packing what the engine hands over: one thread, one bounded queue."""

import threading
from collections import deque
from collections.abc import Callable

from expertmesh.actors.state.codec.packed import Packed
from expertmesh.actors.state.item import Item
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers.content import Stored, Unpacked, arrived, store_packed
from expertmesh.actors.state.tiers.entry import Entry
from expertmesh.actors.state.tiers.host import HostTier

_IDLE_S = 1.0
_SHARE = 4  # of the capacity, as its inverse, may wait unpacked


class Packer:
    """`step` is the thread; all else is called with the store's lock held.

    packed: told, under the lock, of an entry that is committed now, with all of it as the disk
    would have it; or of one that failed, with None.
    """

    def __init__(
        self,
        host: HostTier,
        settings: StateSettings,
        lock: threading.RLock,
        packed: Callable[[Entry, Packed | None], None],
    ) -> None:
        self._host, self._settings, self._lock, self._packed = host, settings, lock, packed
        self._work = threading.Condition(lock)
        self._waiting: deque[tuple[Entry, Item]] = deque()
        self._busy = self._closing = False

    @property
    def queued(self) -> int:
        """Items that are not packed yet."""
        return len(self._waiting) + self._busy

    def has_room(self, item: Item) -> bool:
        """An item alone always has, if the tier can hold it at all."""
        if self._closing or item.nbytes > self._host.capacity:
            return False
        waiting = self._host.writing_bytes
        fits = waiting + item.nbytes <= self._host.capacity // _SHARE
        return len(self._waiting) < self._settings.queue and (fits or not waiting)

    def take(self, item: Item) -> Entry:
        """An entry that can be read already."""
        entry = self._host.add(item.header, Unpacked(item))
        self._waiting.append((entry, item))
        self._work.notify()
        return entry

    def stop(self, reason: str = "") -> None:
        """Takes nothing any more; ends after what is queued. reason: why it was not asked to."""
        self._closing = True
        self._host.read_only = self._host.read_only or reason
        self._work.notify_all()

    def step(self) -> bool:
        """One item. False: the thread is to end."""
        with self._lock:
            if not self._waiting:
                if not self._closing:
                    self._work.wait(_IDLE_S)
                return not self._closing or bool(self._waiting)
            entry, item = self._waiting.popleft()
            if self._host.entries.get(entry.name) is not entry:
                return True  # dropped, or replaced by a newer one
            self._busy = True
        packed: Packed | None = None
        try:
            if arrived(item, self._settings.write_timeout_s):
                packed, content = store_packed(item, self._settings.codec)
        finally:
            with self._lock:
                self._busy = False
                self._conclude(entry, packed, None if packed is None else content)
        return True

    def _conclude(self, entry: Entry, packed: Packed | None, content: Stored | None) -> None:
        if self._host.entries.get(entry.name) is not entry:
            return
        if content is None:
            self._host.failures["pack"] += 1
            self._host.remove(entry)
        else:
            self._host.commit(entry, content)
        self._packed(entry, packed)
