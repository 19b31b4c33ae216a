"""Sessions: named states that requests go on from and leave behind (kv-state 3.9).

A session holds a Tip and the conversation's tokens. Its pages and its snapshot are ordinary items
of the store, shared with forks and with whoever has the same prefix; the session adds a manifest.
With a disk all of it is written, and pinned there, from the end of each turn on; without one it
stays in host memory for as long as there is room. What is lost anywhere is computed again.

On disk a manifest follows when all that it names is there, and what the one before it names goes
when the new one is there: whenever the process dies, the newest manifest is of a whole state.

Several replicas may know a session. Each change raises its version, and the greatest one counts;
a request whose prompt does not begin with a version's tokens simply does not use it, so that an old
version costs time and never a wrong answer.
"""

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from expertmesh.actors.state.deleted import EACH, Deleted
from expertmesh.actors.state.errands import Errands, Steps
from expertmesh.actors.state.item import Item, Kind, Name, StateLayout
from expertmesh.actors.state.manifest import (
    Manifest,
    from_bytes,
    pack_tokens,
    session_name,
    to_item,
)
from expertmesh.actors.state.pins import Pins
from expertmesh.actors.state.session_messages import Problem, SessionProblem
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.store import Fetch, Store
from expertmesh.actors.state.tip import Tip

_log = logging.getLogger(__name__)

# What the reason of a flush that failed is to whoever asked.
_PROBLEMS: dict[str, Problem] = {"full": "full", "timeout": "timeout"}
# Between two looks for sessions that are due to go or that other replicas have written.
SWEEP_S = 10.0
# Manifests that are read at the same time.
READS = 32
# Sessions of which a sweep tries again to bring them to the disk.
RETRIES = 8
# How long what `resume` has loaded is held for the session's next request.
HELD_S = 120.0


class Device(Protocol):
    """What is asked of the prefix cache on the device."""

    def has(self, name: Name) -> bool: ...

    def items(self, names: Sequence[Name]) -> list[Item]:
        """Host copies of those of the names that are there."""
        ...


@dataclass(slots=True)
class Entry:
    """handed: whether the store was given the manifest. written: whether the disk has it. before:
    what the session was until it has. held: a load for the next request, until then referenced.
    held_at: since when."""

    manifest: Manifest
    handed: bool = False
    written: bool = False
    before: list[Manifest] = field(default_factory=list)
    held: Fetch | None = None
    held_at: float = 0.0

    def let_go(self) -> None:
        if self.held is not None:
            self.held.cancel()
            self.held = None


class Sessions:
    """The sessions that one replica knows. The engine's thread, but for `full` and `len`: any."""

    def __init__(
        self,
        store: Store,
        device: Device,
        settings: StateSettings,
        errands: Errands,
        *,
        fingerprint: bytes,
        layout: StateLayout,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """errands: what is waited for without waiting. fingerprint: of root_key. clock: seconds
        since 1970."""
        self.store, self.device, self.settings = store, device, settings
        self._errands = errands
        self.fingerprint, self._layout, self._clock = fingerprint, layout.fingerprint, clock
        self.sizes = {kind: layout.nbytes(kind) for kind in Kind}
        self._entries: dict[Name, Entry] = {}
        self._of: defaultdict[str, set[str]] = defaultdict(set)  # tenant -> living sessions
        self._owned: Counter[str] = Counter()  # how many by owner
        most = EACH * settings.sessions_per_tenant
        self._deleted = Deleted(most, settings.session_ttl_s)
        self._buried: Counter[str] = Counter()  # manifests of deleted ones, by owner
        self._pins = Pins(store)
        self._unwritten: dict[Name, None] = {}  # to be tried again, in this order
        self._next_sweep = float("-inf")

    @property
    def durable(self) -> bool:
        return self.store.durable

    def __len__(self) -> int:
        return sum(map(len, list(self._of.values())))  # asked by any thread

    def full(self, tenant: str, session: str) -> str:
        """Why this one may not be added, "" where it may. From any thread.

        Tenants that differ only behind the first slash have one owner: salts cost nothing, so a
        quota of each would be none. What a disk knows of deleted sessions is bounded, too.
        """
        if session in self._of.get(tenant, ()):
            return ""
        most, owner = self.settings.sessions_per_tenant, _owner(tenant)
        if self._owned[owner] >= most:
            return f"there are {most} sessions already, and no more may be: delete one"
        if self._buried[owner] >= EACH * most:
            return f"{EACH * most} sessions were deleted lately, and no more may be: use one again"
        return ""

    def delete(self, tenant: str, session: str, at: float) -> None:
        """Notes that it was deleted then, whether or not it is known here."""
        self._deleted.note(_owner(tenant), self.name(tenant, session), at)

    def _deleted_since(self, tenant: str, session: str, arrived: float) -> bool:
        name = self.name(tenant, session)
        entry = self._entries.get(name)
        if entry is not None and entry.manifest.deleted and entry.manifest.used >= arrived:
            return True  # by another replica
        return self._deleted.since(_owner(tenant), name, arrived)

    # --- looking ------------------------------------------------------------------------------

    def name(self, tenant: str, session: str) -> Name:
        return session_name(self.fingerprint, tenant, session)

    def expires(self, manifest: Manifest) -> float:
        return manifest.used + self.settings.session_ttl_s

    def living(self, tenant: str) -> list[Manifest]:
        """As far as is known without looking; `refresh` before."""
        known = sorted(self._of.get(tenant, ()))
        found = (self._living(self.name(tenant, session)) for session in known)
        return [entry.manifest for entry in found if entry is not None]

    def _living(self, name: Name) -> Entry | None:
        entry = self._entries.get(name)
        if entry is None or entry.manifest.deleted or self.expires(entry.manifest) <= self._clock():
            return None
        return entry

    def newest(self, tenant: str, session: str, look: bool = True) -> Steps[Entry | None]:
        """The session as whoever changed it last has left it. look: not without asking the disk;
        else only where nothing is known here."""
        name = self.name(tenant, session)
        if self.durable:
            if look or self._living(name) is None:
                yield self.store.look()
            yield from self._read([name])
        return self._living(name)

    def refresh(self) -> Steps[None]:
        """Takes note of all sessions that other replicas, or earlier processes, have written."""
        if self.durable:
            yield self.store.look()
            yield from self._read(list(self.store.positions(Kind.SESSION)))

    def _read(self, names: Iterable[Name]) -> Steps[None]:
        """Reads manifests that are newer on disk than here. What cannot be read is not known."""
        stale = [name for name in names if self.store.position(name) > self._version(name)]
        limit = self.settings.read_timeout_s
        for at in range(0, len(stale), READS):
            fetches = [(n, self.store.fetch([n], limit)) for n in stale[at : at + READS]]
            for name, fetch in fetches:
                yield fetch
                if fetch.items is not None:
                    self._take_note(name, from_bytes(_bytes_of(fetch), name, self.fingerprint))
                fetch.cancel()

    def _take_note(self, name: Name, manifest: Manifest | None) -> None:
        """Of what the disk has."""
        if manifest is not None and manifest.version > self._version(name):
            self.enter(manifest)
            self._written(name)

    def _version(self, name: Name) -> int:
        entry = self._entries.get(name)
        return -1 if entry is None else entry.manifest.version

    # --- requests -----------------------------------------------------------------------------

    def claim(
        self, tenant: str, session: str, mode: str, tokens: Sequence[int]
    ) -> Steps[Tip | None]:
        """Where a request with these prompt tokens goes on, if the session's state serves it."""
        entry = yield from self.newest(tenant, session, look=False)
        if entry is None or entry.manifest.mode != mode or not entry.manifest.begins(tokens):
            return None
        return entry.manifest.point()

    def save(
        self, tenant: str, session: str, mode: str, tokens: Sequence[int], seed: int | None,
        tip: Tip, items: Sequence[Item], arrived: float = math.inf,
    ) -> bool:  # fmt: skip
        """A turn has ended with these tokens, in this state; replaces what the session was before.

        tokens: all that were handed out, of which the tip has computed the first. items: what of
        the tip may not be in the store yet. What the disk does not take stays in host memory.
        arrived: when the front door took the request. False, and the session stays as it was, when
        there is no room there either, something of it is gone already, or it was deleted since.
        """
        if self._deleted_since(tenant, session, arrived):
            return _unsaved(session, "it was deleted meanwhile")
        if full := self.full(tenant, session):
            return _unsaved(session, full)
        name, now = self.name(tenant, session), self._clock()
        before = self._living(name)
        created = now if before is None else before.manifest.created
        manifest = Manifest(
            tenant=tenant,
            session=session,
            mode=mode,
            tokens=pack_tokens(tokens),
            position=tip.position,
            switches=list(tip.switches),
            keys=b"".join(tip.keys),
            tip=tip.key,
            seed=seed,
            created=created,
            used=now,
            version=self.next_version(name),
        )
        for item in items:
            if not self.store.put(item, durable=self.durable) and not self.store.put(item):
                return _unsaved(session, "host memory has no room for its state")
        if not self.keep(tip.names) and not self.somewhere(tip.names):
            return _unsaved(session, "a part of its state is in no tier any more")
        self.settle(manifest)
        return True

    def keep(self, names: Sequence[Name]) -> bool:
        """Sees to it that items are in the store, and stay there where they are durable. False:
        some are nowhere, or there is no room."""
        if not self.durable:
            return True  # what host memory keeps is its own decision
        lost = self.store.keep(names)
        for item in self.device.items(lost) if lost else ():
            self.store.put(item, durable=True)
        return not (lost and self.store.keep(lost))

    def somewhere(self, names: Sequence[Name]) -> bool:
        """Whether each is in some tier, for as long as that has room."""
        return all(self.store.where(name) is not None or self.device.has(name) for name in names)

    # --- changing -----------------------------------------------------------------------------

    def next_version(self, name: Name) -> int:
        return max(time.time_ns(), self._version(name) + 1)

    def touch(self, manifest: Manifest, suspended: bool) -> Manifest:
        """The manifest as it is when it has just been used."""
        name = self.name(manifest.tenant, manifest.session)
        return msgspec.structs.replace(
            manifest, used=self._clock(), version=self.next_version(name), suspended=suspended
        )

    def settle(self, manifest: Manifest) -> None:
        """The session is this from now on; the disk follows without anybody waiting for it."""
        self.enter(manifest)
        self._try(manifest)

    def _try(self, manifest: Manifest) -> None:
        def failed(error: Exception) -> None:
            _log.warning("session %s is in memory only: %s", manifest.session, error)
            self.stay_active(manifest)

        self._errands.start(self.commit(manifest), _ignore, failed)

    def is_now(self, manifest: Manifest) -> bool:
        """Whether the session has not changed since: not by a request that has ended either."""
        name = self.name(manifest.tenant, manifest.session)
        return self._version(name) == manifest.version

    def enter(self, manifest: Manifest) -> None:
        """The session is this from now on, here. `commit` follows."""
        name = self.name(manifest.tenant, manifest.session)
        old = self._entries.get(name)
        entry = self._entries[name] = Entry(manifest)
        self._count(manifest.tenant, manifest.session, not manifest.deleted)
        self._bury(manifest, manifest.deleted - (old is not None and old.manifest.deleted))
        if not manifest.deleted:
            self._pins.add(manifest.point().names)
        if old is not None:
            old.let_go()
            entry.before = old.before
            if old.handed or old.written:
                entry.before = [*old.before, old.manifest]
            else:  # no disk can have it: a disk that fails must not keep the state of every turn
                self._leave(old.manifest)

    def stay_active(self, manifest: Manifest) -> None:
        """The disk has not taken this version for good: whatever it says, it is not suspended. A
        sweep tries again."""
        if self.is_now(manifest):
            name = self.name(manifest.tenant, manifest.session)
            entry = self._entries[name]
            entry.manifest = msgspec.structs.replace(entry.manifest, suspended=False)
            self._unwritten[name] = None

    def commit(self, manifest: Manifest) -> Steps[bool]:
        """Brings a session that was entered to the disk: its parts, then its manifest. False: it
        has changed meanwhile, which is another commit's. Raises SessionProblem, and then the disk
        has it as it was before."""
        name = self.name(manifest.tenant, manifest.session)
        if self.durable:
            yield from self._synced()
            if not self.is_now(manifest):
                return False
            item = to_item(manifest, self.fingerprint, self._layout)
            if not self.store.put(item, durable=True, pinned=True):
                raise SessionProblem("full", "there is no room for it")
            self._entries[name].handed = True
            yield from self._synced()
        if not self.is_now(manifest):
            return False
        self._written(name)
        return True

    def hand_over(self) -> None:
        """The engine ends: manifests that still wait for their parts are written behind them."""
        for entry in self._entries.values():
            if self.durable and not entry.written:
                item = to_item(entry.manifest, self.fingerprint, self._layout)
                self.store.put(item, durable=True, pinned=True)

    def refused(self) -> Steps[None]:
        """Raises SessionProblem that says why `keep` has failed for what is somewhere."""
        yield from self._synced()
        raise SessionProblem("full", "the disk has no room for it")

    def _synced(self) -> Steps[None]:
        flush = self.store.flush()
        yield flush
        if flush.items is None:
            problem = _PROBLEMS.get(flush.reason, "failed")
            raise SessionProblem(problem, f"the disk has not taken everything ({flush.reason})")

    def _written(self, name: Name) -> None:
        """The disk has the manifest, or there is none: what was before is not needed any more."""
        entry = self._entries[name]
        entry.written = True
        before, entry.before = entry.before, []
        for manifest in before:
            self._leave(manifest)

    def _count(self, tenant: str, session: str, lives: bool) -> None:
        known, owner = self._of[tenant], _owner(tenant)
        self._owned[owner] += lives - (session in known)
        (known.add if lives else known.discard)(session)
        if not known:  # salts cost nothing: a tenant without sessions leaves no trace
            del self._of[tenant]
        if not self._owned[owner]:
            del self._owned[owner]

    def _bury(self, manifest: Manifest, more: int) -> None:
        owner = _owner(manifest.tenant)
        self._buried[owner] += more
        if not self._buried[owner]:
            del self._buried[owner]

    def _leave(self, manifest: Manifest) -> None:
        """Nobody goes on from this state under that name any more."""
        if manifest.deleted:
            return
        tip = manifest.point()
        self._pins.remove(tip.names)
        # A snapshot off the grid serves no other prefix; the rest is the prefix cache's.
        if tip.begun and not self._pins.any(tip.end):
            self.store.drop(tip.end)

    def hold(self, tenant: str, session: str, fetch: Fetch) -> None:
        """What was loaded stays in memory for the session's next request, or for HELD_S."""
        entry = self._entries[self.name(tenant, session)]
        entry.let_go()
        entry.held, entry.held_at = fetch, self._clock()

    def twin(self, manifest: Manifest, session: str) -> Manifest:
        """The same state under another name."""
        now, name = self._clock(), self.name(manifest.tenant, session)
        return msgspec.structs.replace(
            manifest, session=session, created=now, used=now, version=self.next_version(name)
        )

    def fetch(self, names: Sequence[Name]) -> Fetch:
        """Loads them from below the device. Larger ones may take longer."""
        expected = self.store.load_seconds(names)
        # Infinite where the load must fail; should it not fail after all, it still ends.
        more = 4 * expected if math.isfinite(expected) else 0.0
        return self.store.fetch(names, self.settings.read_timeout_s + more)

    # --- time ---------------------------------------------------------------------------------

    @property
    def sweep_due(self) -> bool:
        return self._clock() >= self._next_sweep

    def sweep(self) -> None:
        """Drops sessions that nobody has used for too long, lets go of loads nobody came for, and
        tries some again that the disk has not taken."""
        now = self._clock()
        self._next_sweep = now + SWEEP_S
        self._deleted.sweep(now)
        for name, entry in list(self._entries.items()):
            if self.expires(entry.manifest) <= now:
                self.forget(name)
            elif entry.held is not None and entry.held_at + HELD_S <= now:
                entry.let_go()
        if self._unwritten and not self.store.stats().disk.read_only:
            for name in list(self._unwritten)[:RETRIES]:
                del self._unwritten[name]
                self._try_again(name)

    def _try_again(self, name: Name) -> None:
        entry = self._entries.get(name)
        if entry is None or entry.written:
            return
        # What waited for the disk when it failed is not on its way any more.
        if entry.manifest.deleted or self.keep(entry.manifest.point().names):
            self._try(entry.manifest)
        elif self.somewhere(entry.manifest.point().names):
            self._unwritten[name] = None

    def forget(self, name: Name) -> None:
        """The session leaves this replica and its part of the disk."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        entry.let_go()
        self._count(entry.manifest.tenant, entry.manifest.session, False)
        self._bury(entry.manifest, -entry.manifest.deleted)
        for manifest in (*entry.before, entry.manifest):
            self._leave(manifest)
        if self.durable:
            self.store.unpin([name])
            self.store.drop([name])

    def resident(self, names: Sequence[Name]) -> Mapping[Name, list[str]]:
        """All tiers that have each, the highest first; "hot" is the device."""
        return {name: list(self._tiers(name)) for name in names}

    def _tiers(self, name: Name) -> Iterator[str]:
        if self.device.has(name):
            yield "hot"
        if self.store.where(name) == "host":
            yield "host"
        if self.store.on_disk(name):
            yield "disk"


def _unsaved(session: str, why: str) -> bool:
    _log.warning("session %s is not saved: %s", session, why)
    return False


def _owner(tenant: str) -> str:
    return tenant.partition("/")[0]


def _bytes_of(fetch: Fetch) -> bytes:
    """Of the only item of a fetch, a session's."""
    assert fetch.items is not None
    (loaded,) = fetch.items
    out = torch.empty(loaded.raw_bytes, dtype=torch.uint8)
    loaded.layer(0, 0, out)
    return out.numpy().tobytes()


def _ignore(done: bool) -> None:
    pass
