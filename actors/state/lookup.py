"""Where a sequence can begin: what is known of its prefix, in which tier, and what a load costs."""

import time
from collections.abc import Callable, Iterator

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.device import DeviceState
from expertmesh.actors.state.item import Kind, Name, Tier
from expertmesh.actors.state.prefix import NOWHERE, Owner, Prefix, Start, last_start
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import CacheStats
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tree import NOTHING

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
        self._postponed: dict[int, int] = {}  # bytes of those that wait until they may load
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

    @property
    def held_bytes(self) -> int:
        """Of lower tiers' items that queued sequences have asked for and not begun with."""
        return sum(self._held.values())

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
        if self._full(self._postponed.get(seq.number, 0), first):
            return False
        self._postponed.pop(seq.number, None)
        start = self._soonest(seq)
        prefix.aim, prefix.asks = start.position, prefix.asks + 1
        missing = [name for name in start.names if not self.device.has(name)]
        if missing:
            size = sum(self.device.state.layout.nbytes(name.kind) for name in missing)
            if self._full(size, first):
                self._postponed[seq.number] = size
                return False
            prefix.fetch = self.store.fetch(missing, self.settings.read_timeout_s)
            prefix.asked_at = time.monotonic()
            self._fetching[seq.number] = prefix
            self._held[seq.number] = size
            self._count.loads += 1
        prefix.looked = True
        return True

    def _full(self, size: int, first: bool) -> bool:
        """Whether a load of so many bytes must wait for what others hold."""
        if not size or not self._held or first:
            return False
        return self.held_bytes + size > self._most_held

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
            prefix.has_come({item.header.name: item for item in items})
            return
        self._count.loads_failed += prefix.looked
        prefix.aim = 0
        self._held.pop(seq.number, None)
        prefix.let_go()

    def stop(self, seq: Owner) -> None:
        """Nobody waits for the sequence's load any more, nor needs what it has brought."""
        self._fetching.pop(seq.number, None)
        self._postponed.pop(seq.number, None)
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
        known = self.pages_known(seq, self._most(seq))
        for start in self._starts(seq, known, lambda name: self.tier(name) is not None, True):
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

    def _starts(
        self, seq: Owner, pages: int, have: Callable[[Name], bool], below: bool
    ) -> Iterator[Start]:
        """Places to begin, the deepest first, at most CHOICES. pages: how many of its first ones
        count. have: whether a snapshot does, or the end of a tip; below: some may that are not on
        the device.

        Each needs all pages below it and the snapshot at it (kv-state 3.1).
        """
        prefix, tip, found = seq.prefix, seq.prefix.tip, 0
        # What is named below a tip was not computed as this prompt would be: tip or nothing.
        least = 0 if tip is None else len(tip.keys)
        for count in range(pages, least, -1):
            node = prefix.nodes[count - 1] if count <= len(prefix.nodes) else None
            if not below and (node is None or not node.saved):
                continue
            snapshot = Name(prefix.keys[count - 1], Kind.SNAPSHOT)
            if below and not have(snapshot):
                continue
            yield Start(count * PAGE_TOKENS, [*prefix.page_names(count, seq.tokens), snapshot])
            found += 1
            if found == CHOICES:
                break
        if tip is None or least > pages or tip.position > seq.readable:
            return
        if all(map(have, tip.end)):
            yield Start(tip.position, [*prefix.page_names(least, seq.tokens), *tip.end])

    def _most(self, seq: Owner) -> int:
        """Pages that it could begin behind."""
        prefix = seq.prefix
        first = prefix.hit is None and prefix.tip is None and len(seq.tokens) == seq.prompt_len
        if first and not self.settings.prefix_cache:
            return 0
        return last_start(seq.readable + 1) // PAGE_TOKENS

    def here(self, seq: Owner) -> Start:
        """The deepest place to begin with what is on the device or has been loaded."""
        loaded = seq.prefix.loaded

        def known(name: Name) -> bool:
            if name in loaded:
                return True
            node = self.device.find(name)
            return node is not None and seq.prefix.agrees(node, seq.tokens)

        pages = self._pages_here(seq, self._most(seq))
        return next(self._starts(seq, pages, known, bool(loaded)), NOWHERE)

    def _pages_here(self, seq: Owner, most: int) -> int:
        """How many of its first pages are on the device or have been loaded. Those that were found
        before are not looked for again: a prompt that waits for room is asked for in each step."""
        prefix, nodes = seq.prefix, seq.prefix.nodes
        gone = (at for at, node in enumerate(nodes) if node is None or node.page == NOTHING)
        at = min(next(gone, len(nodes)), most)
        while at < most:
            node = self.device.tree.get(prefix.key(at, seq.tokens))
            if not (node and node.page != NOTHING and prefix.agrees(node, seq.tokens)):
                came = at < len(nodes) and nodes[at] is None
                if not came and Name(prefix.keys[at], Kind.PAGE) not in prefix.loaded:
                    break
                node = None
            nodes[at : at + 1] = [node]
            at += 1
        del nodes[at:]
        return at

    def pages_known(self, seq: Owner, most: int) -> int:
        """How many of its first pages are in any tier; at most so many."""
        known = self._pages_here(seq, most)
        while known < most:
            if self.tier(Name(seq.prefix.key(known, seq.tokens), Kind.PAGE)) is None:
                break
            known += 1
        return known

    def tier(self, name: Name) -> Tier | None:
        if self.device.has(name):
            return "hot"
        return None if self.store is None else self.store.where(name)
