"""Where a sequence can begin: what is known of its prefix, in which tier, and what a load costs."""

import time
from collections.abc import Callable

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.device import DeviceState
from expertmesh.actors.state.item import Kind, Name, Tier
from expertmesh.actors.state.prefix import NOWHERE, Owner, Prefix, Start, last_start
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import CacheStats
from expertmesh.actors.state.store import Store

# How many places to begin are weighed against each other, deepest first.
CHOICES = 8
# What a measured time moves towards with each new one.
PACE = 0.2
# How often the disk is looked at for what other replicas have written.
NOTE_S = 1.0
# Who finds less than it was told of asks again, so often in all.
MOST_ASKS = 3
# Queued sequences hold half as many bytes from lower tiers as the host tier has, or so many.
LEAST_HELD = 64 << 20


class Lookup:
    """Engine's thread only. Loads fill host memory, never the device: a sequence that waits for
    one holds no page that another could need."""

    def __init__(
        self, device: DeviceState, store: Store | None, settings: StateSettings, count: CacheStats
    ) -> None:
        self.device, self.store, self.settings = device, store, settings
        self._count = count
        self._fetching: dict[int, Prefix] = {}  # by the number of the sequence that waits
        self._postponed: set[int] = set()  # those that wait until they may load
        self._held: dict[int, int] = {}  # bytes that were asked for, until the sequence begins
        self._most_held = max(settings.host_bytes // 2, LEAST_HELD)
        self._token_s, self._step_s = 1e-4, 1e-3  # of a prompt token, and of a decode step
        self._note_due = 0.0

    @property
    def waiting(self) -> int:
        """Sequences with a load whose outcome they have not seen, or not allowed yet."""
        return len(self._fetching) + len(self._postponed)

    @property
    def loading(self) -> int:
        """Of these, the ones that no step would help before a load has ended."""
        fetching = list(self._fetching.values())
        ended = sum(prefix.fetch is None or prefix.fetch.done for prefix in fetching)
        return 0 if ended == len(fetching) else self.waiting - ended

    # --- asking lower tiers -------------------------------------------------------------------

    def _ask(self, seq: Owner, first: bool) -> bool:
        """Starts to load what lower tiers have, where that is sooner here than computed again.
        False: later, when others in the queue have begun with what they hold."""
        prefix = seq.prefix
        if self.store is None:
            prefix.looked = True
            return True
        if not prefix.noted and self._take_note(seq):
            return True
        start = self._soonest(seq)
        prefix.aim, prefix.asks = start.position, prefix.asks + 1
        missing = [name for name in start.names if not self.device.has(name)]
        if missing:
            size = sum(self.device.state.layout.nbytes(name.kind) for name in missing)
            if self._held and not first and sum(self._held.values()) + size > self._most_held:
                self._postponed.add(seq.number)
                return False
            prefix.fetch = self.store.fetch(missing, self.settings.read_timeout_s)
            prefix.asked_at = time.monotonic()
            self._fetching[seq.number] = prefix
            self._held[seq.number] = size
            self._count.loads += 1
        prefix.looked = True
        return True

    def _take_note(self, seq: Owner) -> bool:
        """Whether the sequence waits until the disk has been looked at. It does when another
        replica has begun it and was lost: what that one wrote last is worth most."""
        assert self.store is not None
        prefix, now = seq.prefix, time.monotonic()
        prefix.noted = True
        begun = len(seq.tokens) > seq.prompt_len
        if self.settings.disk is None or not (begun or now >= self._note_due):
            return False
        self._note_due = now + NOTE_S
        note = self.store.look()
        if begun:
            prefix.fetch = note
            self._fetching[seq.number] = prefix
        return begun

    def start(self, seq: Owner, first: bool) -> Start | None:
        """Where the sequence begins; None while something is loaded for that. first: in the queue,
        which may load whatever others hold."""
        prefix = seq.prefix
        while self.answered(seq, first):
            start = self.here(seq)
            if start.position >= prefix.aim or prefix.asks >= MOST_ASKS:
                return start
            prefix.looked = False  # what was here when it asked has made way for others
        return None

    def answered(self, seq: Owner, first: bool) -> bool:
        """Whether lower tiers have said all there is to say. What was loaded is then in
        `prefix.loaded`."""
        prefix = seq.prefix
        self._postponed.discard(seq.number)
        while True:
            if prefix.fetch is not None and not prefix.fetch.done:
                return False
            if self._fetching.pop(seq.number, None) is not None:
                self._take_over(seq)
            if prefix.looked:
                return True
            if not self._ask(seq, first):
                return False

    def _take_over(self, seq: Owner) -> None:
        """Uses what a load has brought, if all of it is of these very tokens."""
        prefix = seq.prefix
        assert prefix.fetch is not None
        items = prefix.fetch.items
        if prefix.looked:  # else it was only a look at the disk
            self._count.load_seconds += time.monotonic() - prefix.asked_at
        if items and all(i.exact and prefix.fits(i.header, seq.tokens) for i in items):
            prefix.loaded = {item.header.name: item for item in items}
            return
        self._count.loads_failed += prefix.looked
        prefix.aim = 0
        self._held.pop(seq.number, None)
        prefix.let_go()

    def stop(self, seq: Owner) -> None:
        """Nobody waits for the sequence's load any more, nor needs what it has brought."""
        self._fetching.pop(seq.number, None)
        self._postponed.discard(seq.number)
        self._held.pop(seq.number, None)
        seq.prefix.let_go()

    # --- what is sooner -----------------------------------------------------------------------

    def _soonest(self, seq: Owner) -> Start:
        """The place to begin, in whatever tier, from which the first token comes soonest."""
        assert self.store is not None
        here = self.here(seq)
        best, best_s = here, self._compute_s(seq, here.position)
        if seq.prefix.tip is not None and not here.position:
            best_s = float("inf")  # computed again, the rest of the session would have other bits
        for start in self._starts(seq, lambda name: self.tier(name) is not None):
            if start.position <= here.position:
                break
            missing = [name for name in start.names if not self.device.has(name)]
            seconds = self.store.load_seconds(missing) if missing else 0.0
            seconds += self._compute_s(seq, start.position)
            if seconds < best_s:
                best, best_s = start, seconds
        return best

    def _compute_s(self, seq: Owner, position: int) -> float:
        prompt = max(0, seq.prompt_len - position)
        decode = len(seq.tokens) - max(position, seq.prompt_len)
        return prompt * self._token_s + decode * self._step_s

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """What a step took, for the next choice between loading and computing."""
        if prompt_tokens:
            self._token_s += PACE * (seconds / prompt_tokens - self._token_s)
        else:
            self._step_s += PACE * (seconds - self._step_s)

    # --- where it can begin -------------------------------------------------------------------

    def _starts(self, seq: Owner, have: Callable[[Name], bool]) -> list[Start]:
        """Places to begin, the deepest first, at most CHOICES. have: whether a name counts.

        Each needs all pages below it and the snapshot at it (kv-state 3.1).
        """
        prefix, starts = seq.prefix, list[Start]()
        tip = prefix.tip
        first = prefix.hit is None and tip is None and len(seq.tokens) == seq.prompt_len
        if first and not self.settings.prefix_cache:
            return starts
        last = last_start(seq.readable + 1) // PAGE_TOKENS
        pages: list[Name] = []
        while len(pages) < last:
            name = Name(prefix.key(len(pages), seq.tokens), Kind.PAGE)
            if not have(name):
                break
            pages.append(name)
        # What is named below a tip was not computed as this prompt would be: tip or nothing.
        below = 0 if tip is None else tip.position // PAGE_TOKENS
        for count in range(len(pages), below, -1):
            if len(starts) >= CHOICES:
                break
            snapshot = Name(prefix.keys[count - 1], Kind.SNAPSHOT)
            if have(snapshot):
                starts.append(Start(count * PAGE_TOKENS, [*pages[:count], snapshot]))
        if tip is not None and tip.position <= seq.readable and all(map(have, tip.names)):
            starts.append(Start(tip.position, tip.names))
        return starts

    def here(self, seq: Owner) -> Start:
        """The deepest place to begin with what is on the device or has been loaded."""
        loaded = seq.prefix.loaded

        def known(name: Name) -> bool:
            if name in loaded:
                return True
            node = self.device.find(name)
            return node is not None and seq.prefix.fits(
                node.header(name.kind, self.device.layout), seq.tokens
            )

        return next(iter(self._starts(seq, known)), NOWHERE)

    def tier(self, name: Name) -> Tier | None:
        if self.device.has(name):
            return "hot"
        return None if self.store is None else self.store.where(name)
