"""Writing to the cold tier: one thread, in groups, with an account of what is owed."""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

from expertmesh.actors.state.codec.packed import Packed
from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Name
from expertmesh.actors.state.stats import TierStats
from expertmesh.actors.state.tiers.breaker import Breaker, Clock, WriteLimit
from expertmesh.actors.state.tiers.cold import add_failures
from expertmesh.actors.state.tiers.entry import State
from expertmesh.actors.state.tiers.fetch import StoreFetch
from expertmesh.actors.state.tiers.host import HostTier
from expertmesh.actors.state.tiers.orders import Order, Verb, carry_out

_IDLE_S = 1.0
_GROUP, _GROUP_BYTES = 64, 32 << 20  # of one sync
_WRITE_BURST_S = 10.0  # of the write limit
_MOST_LOST = 4096  # names; a flush only tells that there are some


class ColdWriter:
    """Orders to the log, carried out in turn. `step` is the thread; all else is called with the
    store's lock held.

    pinned: whether a name is, when it is written. settled: told, under the lock, of what is on the
    disk now ("") or will not be (why). end: ends a fetch. announce: called without the lock when
    some have ended.
    """

    def __init__(
        self,
        log: DiskLog,
        host: HostTier,
        lock: threading.RLock,
        clock: Clock,
        *,
        queue: int,
        timeout_s: float,
        bytes_per_s: float,
        pinned: Callable[[Name], bool],
        settled: Callable[[Name, str], None],
        end: Callable[[StoreFetch, str], None],
        announce: Callable[[], None],
    ) -> None:
        self._log, self._host, self._lock, self._clock = log, host, lock, clock
        self._queue, self._timeout_s = queue, timeout_s
        self._pinned, self._settled, self._end = pinned, settled, end
        self._announce = announce
        self._work = threading.Condition(lock)
        self._orders: deque[Order] = deque()
        self._unowed: set[Name] = set()  # writes under way that nobody waits for
        self._owed: dict[Name, int] = {}
        self._tickets = count(1)
        self._flushes: list[tuple[StoreFetch, dict[Name, int]]] = []
        # Why what was owed is not written, until a flush has told or it is written after all.
        self._lost: dict[Name, str] = {}
        self._began: float | None = None  # when the group was that is being written
        self._under_way = 0  # orders in it
        self._late = self._full = self._closing = False
        self.breaker = Breaker(clock)
        self.limit = WriteLimit(clock, bytes_per_s, bytes_per_s * _WRITE_BURST_S)
        self.failures: Counter[str] = Counter()
        self.refused = 0
        self.down = ""  # why nothing is written any more

    @property
    def read_only(self) -> str:
        """Why nothing is taken, "" where it is."""
        if self.down or self._late:
            return self.down or "slow"
        return "failing" if self.breaker.open else ""

    def tell(self, stats: TierStats) -> None:
        """Adds what only we know."""
        stats.queued += len(self._orders) + self._under_way
        stats.refused += self.refused
        stats.read_only = self.read_only or stats.read_only
        add_failures(stats, self.failures)

    @property
    def room(self) -> int:
        """How many more writes for a cache's sake are taken now. A full disk gets one to try."""
        if self.read_only or self._closing:
            return 0
        return max(0, (1 if self._full else self._queue) - len(self._unowed))

    def offer(self, name: Name, nbytes: int, packed: Packed | None = None) -> bool:
        """Takes a write for a cache's sake. False: not now. packed: where host memory keeps less
        than the disk shall have."""
        if name in self._unowed or name in self._owed:
            return True
        if not self.room or not self.limit.take(nbytes):
            self.refused += 1
            return False
        self._unowed.add(name)
        self._push(Order(Verb.WRITE, [name], packed))
        return True

    def promise(self, name: Name) -> bool:
        """The item is owed from now on; `write` follows when it is packed. False: it cannot be."""
        if self.read_only or self._closing:
            self.refused += 1
            self._lose(name, self.read_only or "closed")
            return False
        self._lost.pop(name, None)
        self._owed[name] = next(self._tickets)
        return True

    def write(self, name: Name, nbytes: int, packed: Packed | None = None) -> None:
        """What was promised can be written."""
        self.limit.take(nbytes, owed=True)
        self._push(Order(Verb.WRITE, [name], packed))

    def owes(self, name: Name) -> bool:
        return name in self._owed

    def writes(self, name: Name) -> bool:
        """Whether a write that nobody waits for is under way."""
        return name in self._unowed

    def pin(self, names: Sequence[Name], owed: bool = False) -> bool:
        """What the disk has is not evicted. owed: a flush waits for it. False: not now."""
        if owed and not all(self.promise(name) for name in names):
            return False
        self._tell(Order(Verb.PIN, list(names)))
        return True

    def unpin(self, names: Sequence[Name]) -> None:
        self._tell(Order(Verb.UNPIN, list(names)))

    def remove(self, names: Sequence[Name]) -> None:
        """Also what is still to be written."""
        for name in names:
            self.settle(name, "dropped")
        self._tell(Order(Verb.REMOVE, list(names)))

    def look(self, fetch: StoreFetch) -> None:
        """Ends `fetch` when it is known what other replicas have written until now."""
        if self.read_only or self._closing:
            self._end(fetch, "busy" if self.read_only else "closed")
            return
        waiting = [order for order in self._orders if order.verb is Verb.LOOK]
        if not waiting:
            waiting = [Order(Verb.LOOK)]
            self._push(waiting[0])
        waiting[0].waiters.append(fetch)

    def settle(self, name: Name, reason: str, ticket: int | None = None) -> None:
        """A name's fate is known. ticket: of the promise that is kept or broken; None: any."""
        ticket = self._owed.get(name, 0) if ticket is None else ticket
        broken = "" if reason == "dropped" else reason
        untold = 0 < self._owed.get(name, 0) <= ticket
        if untold:
            del self._owed[name]
        for fetch, left in self._flushes:
            if 0 < left.get(name, 0) <= ticket:
                del left[name]
                untold = False
                if broken or not left:
                    self._end(fetch, broken)
        if untold and broken:
            self._lose(name, broken)
        self._flushes = [pair for pair in self._flushes if not pair[0].ended]
        self._settled(name, reason)

    def flush(self, fetch: StoreFetch) -> None:
        """Ends `fetch` when everything owed now is on the disk, or something will not be."""
        lost, self._lost = self._lost, {}
        if lost or not self._owed:
            self._end(fetch, next(iter(lost.values()), ""))
        else:
            self._flushes.append((fetch, dict(self._owed)))

    def tick(self) -> None:
        """Gives up what waits behind a write that hangs: its callers have other things to do."""
        if self._began is None or self._late or self._clock() - self._began < self._timeout_s:
            return
        self._late = True
        self.failures["timeout"] += 1
        self.breaker.trip()
        self._give_up("timeout")

    def stop(self, reason: str = "") -> None:
        """Takes nothing any more; ends after what is queued, at once where there is a reason."""
        self._closing = True
        if reason:
            self.down = reason
            self._give_up(reason)
        self._work.notify_all()

    def step(self) -> bool:
        """One group. False: the thread is to end."""
        with self._lock:
            group = self._next_group()
            if not group:
                return not self._closing or (bool(self._orders) and not self.breaker.open)
            self._began, self._under_way = self._clock(), len(group)
        failure = "error"
        try:
            failure = carry_out(self._log, group)
        finally:
            with self._lock:
                self._conclude(group, failure)
            self._announce()
        return True

    def _next_group(self) -> list[Order]:
        if not self._orders and not self._closing:
            self._work.wait(_IDLE_S)
        if self._orders and not self.breaker.allow():
            self._give_up("busy")
            self._work.wait(_IDLE_S / 10)
            return []
        group: list[Order] = []
        size = 0
        while self._orders and len(group) < _GROUP and size < _GROUP_BYTES:
            order = self._orders.popleft()
            if order.verb is not Verb.WRITE or self._resolve(order):
                group.append(order)
                order.tickets = [self._owed.get(name, 0) for name in order.names]
                size += order.packed.nbytes if order.packed is not None else 0
        if not group:
            self.breaker.abandoned()
        return group

    def _resolve(self, order: Order) -> bool:
        """What is written: the item as it is now. False: it is gone, or will come again."""
        (name,) = order.names
        entry = self._host.entries.get(name)
        if entry is not None and entry.state is not State.WRITING:
            order.header, order.pinned = entry.header, self._pinned(name)
            if order.packed is None and entry.content.exact:
                order.packed = entry.content.packed
            if order.packed is not None:
                return True
        self._unowed.discard(name)
        if entry is None or entry.state is not State.WRITING:
            self.settle(name, "dropped")
        return False

    def _conclude(self, group: Sequence[Order], failure: str) -> None:
        late, self._began, self._late, self._under_way = self._late, None, False, 0
        if failure:
            self.failures[failure] += 1
            self.breaker.failed()
        elif not late:  # what was late and went well is stored, and the pause stays
            self.breaker.succeeded()
        written = [order for order in group if order.verb is Verb.WRITE]
        if written:
            self._full = any(order.failed == "full" for order in written)
        for order in group:
            reason = failure or order.failed
            for fetch in order.waiters:
                self._end(fetch, reason)
            for name, ticket in zip(order.names, order.tickets, strict=True):
                if order.verb is Verb.WRITE:
                    self._unowed.discard(name)
                if order.verb is Verb.WRITE or (ticket and order.verb is Verb.PIN):
                    self.settle(name, reason, ticket)
            if failure and order.verb in (Verb.PIN, Verb.UNPIN, Verb.REMOVE):
                self._orders.append(order)  # these are not given up

    def _give_up(self, reason: str) -> None:
        """All writes and looks that wait; removals and pins stay."""
        orders, self._orders = self._orders, deque()
        for order in orders:
            for fetch in order.waiters:
                self._end(fetch, reason)
            if order.verb is Verb.WRITE:
                self._unowed.difference_update(order.names)
            elif order.verb is not Verb.LOOK:
                self._orders.append(order)
            if order.verb in (Verb.WRITE, Verb.PIN):
                for name in order.names:
                    self.settle(name, reason)

    def _lose(self, name: Name, reason: str) -> None:
        if len(self._lost) < _MOST_LOST:
            self._lost[name] = reason

    def _tell(self, order: Order) -> None:
        if order.names and not self.down:
            self._push(order)

    def _push(self, order: Order) -> None:
        self._orders.append(order)
        self._work.notify()
