"""The engine's side of cached state: which sequence begins where, and what it leaves behind.

Everything here runs on the engine's thread. A sequence

- `open`s: its names are made;
- is `attach`ed when the scheduler would start it: first what lower tiers have is loaded, then pages
  that are on the device are shared;
- `begin`s: its slot and its own pages get what they start from, or zeros;
- `commit`s after each step that has completed: what is whole gets its name, for others to find;
- `close`s, or is `withdraw`n when its state cannot be trusted.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from expertmesh.actors.model.batch import NO_PAGE, PAGE_TOKENS
from expertmesh.actors.state.device import DeviceState
from expertmesh.actors.state.filling import LayerFill, take_out
from expertmesh.actors.state.item import Header, Item, Kind, Name
from expertmesh.actors.state.keys import root_key
from expertmesh.actors.state.lookup import Lookup
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.prefix import (
    NOWHERE,
    Owner,
    Prefix,
    ladder,
    last_start,
    thin,
)
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.stats import CacheStats
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tiers.ceiling import Ceiling
from expertmesh.actors.state.tip import Tip, onward
from expertmesh.actors.state.tree import NOTHING

KEPT_CHECKPOINTS = 2
EVERYTHING = 1 << 60


class StateCache:
    def __init__(
        self,
        state: ModelState,
        settings: StateSettings,
        fingerprint: bytes,
        store: Store | None = None,
        cell: int = PAGE_TOKENS,
    ) -> None:
        """fingerprint: of weights and everything else that decides about bits. cell: prompts are
        cut at multiples of it within each 64 tokens, which bits depend on below 64."""
        self.state, self.settings, self.store = state, settings, store
        self.device = DeviceState(state)
        self.pages = self.device.pages
        self.fingerprint = fingerprint + (b"" if cell >= PAGE_TOKENS else b" cell %d" % cell)
        self._count = CacheStats(snapshots_total=state.snapshots)
        self._ceiling = Ceiling()
        self.lookup = Lookup(self.device, store, settings, self._count)
        self._filled: list[Owner] = []

    # --- a sequence arrives -------------------------------------------------------------------

    def open(self, seq: Owner, tenant: str, mode: str = "exact", tip: Tip | None = None) -> None:
        """Gives the sequence its prefix. tip: the state that it goes on from, where its tokens are
        those of the tip."""
        root = root_key(self.fingerprint, tenant, mode)
        switches = [seq.prompt_len]
        if tip is not None:
            if Tip.of(root, seq.tokens, tip.position, tip.switches) == tip:
                switches = [*onward(tip.switches, tip.position), seq.prompt_len]
            else:
                tip = None
        keys = [] if tip is None else list(tip.keys)
        seq.prefix = Prefix(root, self.device.layout, tuple(switches), tip, keys)
        self._ceiling.add(seq.prefix.all_keys(seq.tokens[: seq.prompt_len]))

    def reopen(self, seq: Owner) -> None:
        """The sequence has lost its pages and slot and will start again."""
        prefix = seq.prefix
        self.lookup.stop(seq)
        self._free_places(prefix)
        prefix.published, prefix.looked, prefix.asks = 0, False, 0
        prefix.start, prefix.shared, prefix.lent, prefix.rungs = NOWHERE, [], (), []

    @property
    def loading(self) -> int:
        """Sequences that wait for nothing but a load that has not ended."""
        return self.lookup.loading

    @property
    def waiting(self) -> int:
        """These, and the ones whose load has ended since the last plan."""
        return self.lookup.waiting

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        """What a step took, for the next choice between loading and computing."""
        self.lookup.observe(prompt_tokens, seconds)

    # --- it starts ----------------------------------------------------------------------------

    def attach(self, seq: Owner, first: bool = True) -> int | None:
        """How many pages the sequence will read that it need not take; None while it loads. first:
        in the queue.

        It reads them from now on; `detach` or `begin` follows. Its `computed` is where it begins.
        """
        prefix = seq.prefix
        start = self.lookup.start(seq, first)
        if start is None:
            return None
        prefix.start = start
        if prefix.tip is not None and start.position < prefix.tip.position:
            self._forget_tip(seq)
            return self.attach(seq, first)
        seq.computed = start.position
        whole, old = start.position // PAGE_TOKENS, self._old(seq)
        prefix.shared = [
            NOTHING if node is None or at in old else node.page
            for at, node in enumerate(prefix.nodes[:whole])
        ]
        if start.position % PAGE_TOKENS:
            prefix.shared.append(NOTHING)  # it goes on writing there: that page must be its own
        mine = [page for page in prefix.shared if page != NOTHING]
        self.pages.share(seq.number, mine)
        prefix.lent = self.device.lent(start.names[-1]) if start.names else ()
        return len(mine)

    def _forget_tip(self, seq: Owner) -> None:
        """The state that it was to go on from is gone: its prompt is as any other, and so are its
        names."""
        prefix = seq.prefix
        self._count.lost_tips += 1
        self.lookup.stop(seq)
        prefix.rename((seq.prompt_len,))
        prefix.looked = False

    def prepare(self, seq: Owner, first: bool) -> None:
        """It cannot start yet; what lower tiers have of it is loaded meanwhile. first: in line."""
        self.lookup.answered(seq, first)

    def detach(self, seq: Owner) -> None:
        """It does not start yet, and lets go of the pages on the device."""
        self.pages.give_back(seq.number, [p for p in seq.prefix.shared if p != NOTHING])
        seq.prefix.shared, seq.prefix.lent, seq.computed = [], (), 0

    def pages_of(self, seq: Owner, count: int) -> list[int]:
        """The sequence's pages, `count` in all, those that it shares among them; besides, what its
        context now has."""
        shared, old = seq.prefix.shared, self._old(seq)
        for at in old:  # before room is made for others: they may lie idle
            self._set_aside(seq, at)
        own = iter(self.pages.take(seq.number, count - sum(p != NOTHING for p in shared)))
        return [
            NO_PAGE if at in old else next(own) if page == NOTHING else page
            for at, page in enumerate(shared)
        ] + list(own)

    def _old(self, seq: Owner) -> range:
        """Pages of where it begins that do not come to the device."""
        context = seq.context
        return range(0) if context is None else context.leaving(seq.prefix.start.position)

    def _set_aside(self, seq: Owner, at: int) -> None:
        assert seq.context is not None
        name = seq.prefix.start.names[at]
        node = self.device.find(name)
        if node is not None:
            seq.context.take(self.device.page(node.page))
            return
        rows = torch.empty_like(self.device.page(0))
        for layer, out in enumerate(rows):
            seq.prefix.loaded[name].layer(0, layer, out)
        seq.context.take(rows)

    def begin(self, seqs: Sequence[Owner], grown: Sequence[int] = ()) -> None:
        """Slots and pages get what their sequences start from, before the forward pass of the step
        in which they were admitted. grown: pages that others have got since the last step, of which
        a part may be kept, and nothing of a former owner with it."""
        fills = []
        for seq in seqs:
            # By ownership, not by length: a one-token prompt must not inherit a stranger's state.
            self.state.zero_slot(seq.slot)
            if seq.prefix.lent:  # before any page is written: they may be of others since `attach`
                self.device.restore(seq.slot, seq.prefix.lent)
        self.state.zero_pages(grown)
        for seq in seqs:
            prefix = seq.prefix
            shared = {page for page in prefix.shared if page != NOTHING}
            self.state.zero_pages([page for page in seq.near if page not in shared])
            if prefix.start.position:
                fills += self._restore(seq)
            if prefix.loaded:
                self._filled.append(seq)
            self._note_start(seq)
            prefix.published = len(prefix.shared)
            if NOTHING in prefix.shared:
                prefix.published = prefix.shared.index(NOTHING)
            prefix.wanted = self._wanted(seq)
        self.state.filling = fills

    def _restore(self, seq: Owner) -> list[LayerFill]:
        """Copies, so that what is shared stays what it was; from the host in the background."""
        prefix = seq.prefix
        *pages, last = prefix.start.names
        content = None
        node = self.device.find(last)
        if node is not None:
            if not prefix.lent:
                self.state.restore(seq.slot, node.snapshot)
            if prefix.hit is None:  # else it begins again from what was its own
                self.device.used(node, deeper=prefix.start.position < last_start(seq.prompt_len))
        elif not prefix.lent:
            content = prefix.loaded[last]
        copied = [
            (seq.pages[at], prefix.loaded[name])
            for at, name in enumerate(pages)
            if prefix.shared[at] == NOTHING and seq.pages[at] != NO_PAGE
        ]
        if content is None and not copied:
            return []
        return [LayerFill(self.state, copied, seq.slot, content)]

    def _note_start(self, seq: Owner) -> None:
        """Counts what the sequence did not have to compute, the first time it starts."""
        prefix, loaded = seq.prefix, seq.prefix.loaded
        *pages, last = prefix.start.names or [Name(b"", Kind.SNAPSHOT)]
        if last in loaded and loaded[last].tier == "disk":
            prefix.saved_at = prefix.start.position
        if self.store is not None and pages:
            self.store.touch([*pages, last])
        if prefix.hit is not None:
            return
        prefix.hit = min(prefix.start.position, seq.prompt_len)
        self.device.tick()
        self._count.queries += seq.prompt_len
        self._count.hits += prefix.hit
        tiers = self._count.hits_by_tier
        for at, name in enumerate(pages):
            tier = loaded[name].tier if name in loaded else "hot"
            tokens = min(PAGE_TOKENS, prefix.hit - at * PAGE_TOKENS)
            tiers[tier] = tiers.get(tier, 0) + max(0, tokens)

    # --- snapshots ----------------------------------------------------------------------------

    def _wanted(self, seq: Owner) -> list[int]:
        """Where its prompt's snapshots belong (kv-state 3.2): where it parts from what is known,
        at its last place to begin, and a ladder for long ones."""
        start, end = seq.prefix.start.position, last_start(seq.prompt_len)
        known = max(start // PAGE_TOKENS, self.lookup.pages_known(seq, end // PAGE_TOKENS))
        self._count.recomputed_state += max(0, known * PAGE_TOKENS - start)
        seq.prefix.junction = known * PAGE_TOKENS
        places = {known * PAGE_TOKENS, end, *ladder(seq.prompt_len, self.settings.ladder_tokens)}
        return sorted(place for place in places if start < place <= end)

    def saves(self, seq: Owner, begin: int, end: int) -> tuple[tuple[int, int], ...]:
        """(position, place) of the snapshots that a prompt piece begin..end is to leave."""
        prefix, step = seq.prefix, self.settings.ladder_tokens
        due = [at for at in prefix.wanted if at <= end]
        del prefix.wanted[: len(due)]
        rungs = [at for at in due if self._is_rung(seq, at)]
        idle = set(rungs).difference(thin([*prefix.rungs, *rungs], end, step))
        # Rungs last: while all places are being written there is none for what comes after.
        for at in sorted(due, key=lambda at: (at in rungs, -at)):
            name = Name(prefix.key(at // PAGE_TOKENS - 1, seq.tokens), Kind.SNAPSHOT)
            if at > begin and at not in idle and self.lookup.tier(name) is None:
                place = self.device.take_place(rung=at in rungs)
                if place is not None:
                    prefix.saving.append((at, place))
        prefix.saving.sort()
        return tuple(prefix.saving)

    def _free_places(self, prefix: Prefix) -> None:
        """Of snapshots that were to be written and were not."""
        for _, place in prefix.saving:
            self.device.give_place_back(place)
        prefix.saving = []

    # --- after a step -------------------------------------------------------------------------

    def arrived(self) -> None:
        """The step has ended: what was loaded for it is on the device."""
        self.state.filling = ()
        for seq in self._filled:
            self.lookup.stop(seq)
        self._filled = []

    def commit(self, seq: Owner) -> None:
        """The step that brought the sequence to `computed` has completed."""
        self._name(seq)
        if seq.context is not None:
            gone = seq.context.leave(self.state.latents, seq.pages, seq.computed)
            self.pages.give_back(seq.number, gone)

    def _name(self, seq: Owner) -> None:
        """What is whole is found by others from now on, and safe where it must be."""
        prefix = seq.prefix
        whole = seq.computed // PAGE_TOKENS
        if whole == prefix.published and not prefix.saving:
            return
        for at in range(prefix.published, whole):
            if seq.pages[at] == NO_PAGE:
                continue
            header = prefix.header(Kind.PAGE, at, seq.tokens)
            seq.pages[at] = self.device.name_page(header, seq.number, seq.pages[at])
            # Pages of answers can wait for a checkpoint, unless they are to leave the device.
            if header.lineage == "prefill" or seq.context is not None:
                self._put(header, (self.device.page(seq.pages[at]),))
        prefix.published = whole
        saved = [position for position, _ in prefix.saving]
        for position, place in prefix.saving:
            header = prefix.header(Kind.SNAPSHOT, position // PAGE_TOKENS - 1, seq.tokens)
            node = self.device.name_snapshot(header, place, self._is_rung(seq, position))
            if node is not None:
                self._put(header, self.device.saved(node))
        prefix.saving = []
        if saved:
            self._thin(seq, saved)
        if self.store is not None:
            self._keep_safe(seq, saved)

    def _put(self, header: Header, tensors: Sequence[Tensor], durable: bool = False) -> None:
        if self.store is not None and (durable or self.store.where(header.name) is None):
            self.store.put(take_out(header, tensors), durable=durable)

    def _thin(self, seq: Owner, saved: list[int]) -> None:
        """Of the ladder that it has left behind, one snapshot per octave of distance stays."""
        prefix, step = seq.prefix, self.settings.ladder_tokens
        prefix.rungs += [at for at in saved if self._is_rung(seq, at)]
        kept = thin(prefix.rungs, seq.computed, step)
        for position in set(prefix.rungs).difference(kept):
            name = Name(prefix.keys[position // PAGE_TOKENS - 1], Kind.SNAPSHOT)
            node = self.device.find(name)
            if node is not None:
                self.device.forget_snapshot(node)
            if self.store is not None:
                self.store.drop([name])
        prefix.rungs = kept

    def _is_rung(self, seq: Owner, position: int) -> bool:
        """Whether its snapshot there is for edits alone."""
        end = last_start(seq.prompt_len)
        return position % self.settings.ladder_tokens == 0 and position not in (
            end,
            seq.prefix.junction,
        )

    def _keep_safe(self, seq: Owner, saved: list[int]) -> None:
        """Leaves a state behind often enough that a loss of this process, or of the pages, costs
        at most `checkpoint_tokens`."""
        due = seq.prefix.saved_at + max(PAGE_TOKENS, self.settings.checkpoint_tokens - PAGE_TOKENS)
        if saved and saved[-1] >= due:
            self._checkpoint(seq, saved[-1], live=False)
        elif seq.prompt_len < seq.computed >= due and seq.computed % PAGE_TOKENS == 0:
            self._checkpoint(seq, seq.computed, live=True)

    def _checkpoint(self, seq: Owner, position: int, live: bool) -> None:
        """live: from the sequence's slot, where no snapshot was taken."""
        assert self.store is not None
        prefix, durable = seq.prefix, self.settings.disk is not None
        last = position // PAGE_TOKENS - 1
        names = prefix.page_names(last + 1, seq.tokens)
        header = prefix.header(Kind.SNAPSHOT, last, seq.tokens)
        if not live:
            names.append(header.name)
        if durable:
            missing = self.store.keep(names)
        else:
            missing = [name for name in names if self.store.where(name) is None]
        for item in self.device.items(missing):
            self.store.put(item, durable=durable)
        if live:
            self._put(header, self.device.slot(seq.slot), durable)
            prefix.checkpoints.append(header.name)
            self.store.drop(prefix.checkpoints[:-KEPT_CHECKPOINTS])
            prefix.checkpoints = prefix.checkpoints[-KEPT_CHECKPOINTS:]
        prefix.saved_at = position
        self._count.checkpoints += 1

    def save_tip(self, seq: Owner) -> tuple[Tip, list[Item]]:
        """The sequence's state as it is, at any position, and what of it no lower tier has. After
        its last step, before its slot and pages are given back."""
        prefix, position = seq.prefix, seq.computed
        switches = [at for at in prefix.switches if at < position]
        tip = Tip.of(prefix.root, seq.tokens, position, switches, known=prefix.keys)
        prefix.checkpoints = [name for name in prefix.checkpoints if name not in tip.end]
        absent = [n for n in tip.pages if self.store is None or self.store.where(n) is None]
        items = self.device.items(absent)
        begin = (position - 1) // PAGE_TOKENS * PAGE_TOKENS
        tokens, above = tuple(seq.tokens[begin:position]), begin // PAGE_TOKENS
        parent = tip.keys[above - 1] if above else prefix.root
        lineage, layout = prefix.lineage(position), self.device.layout
        for name in tip.end:
            header = Header(tip.key, name.kind, parent, position, tokens, lineage, layout)
            page = name.kind is Kind.PAGE
            tensors = (self.device.page(seq.pages[above]),) if page else self.device.slot(seq.slot)
            items.append(take_out(header, tensors))
        return tip, items

    # --- it leaves ----------------------------------------------------------------------------

    def close(self, seq: Owner) -> None:
        """The sequence has ended."""
        self.lookup.stop(seq)
        self._free_places(seq.prefix)
        if self.store is not None and seq.prefix.checkpoints:
            self.store.drop(seq.prefix.checkpoints)
            seq.prefix.checkpoints = []

    def withdraw(self, seq: Owner) -> None:
        """Nothing that this sequence has read or written may be found any more: its numbers were
        not finite. What nobody else reads is zeroed."""
        far = [
            key for key, page in zip(seq.prefix.keys, seq.pages, strict=False) if page == NO_PAGE
        ]
        gone = [node.page for key in far if (node := self.device.find(Name(key, Kind.PAGE)))]
        nodes = [node for page in seq.near + gone if (node := self.device.forget_page(page))]
        if self.store is not None:
            keys = [*far, *(node.key for node in nodes)]
            self.store.drop([Name(key, kind) for key in keys for kind in Kind])
        self.state.zero_pages([p for p in seq.near if self.pages.alone(seq.number, p)])

    def evict(self, pages: int = EVERYTHING, snapshots: int = EVERYTHING) -> None:
        """Forgets up to so many pages that nobody uses, and snapshots, on the device."""
        self.device.evict(pages, snapshots)

    def stats(self) -> CacheStats:
        """A copy."""
        device = self.device
        return msgspec.structs.replace(
            self._count,
            hits_by_tier=dict(self._count.hits_by_tier),
            ceiling=self._ceiling.ratio,
            nodes=len(device.tree),
            cached_pages=self.pages.idle,
            snapshots=device.tree.snapshots,
            snapshot_bytes=device.tree.snapshots * self.state.slot_bytes,
            lent_pages=device.tree.lent_pages,
            evicted_pages=device.evicted_pages,
            evicted_snapshots=device.evicted_snapshots,
            loading=self.lookup.waiting,
            loading_bytes=self.lookup.held_bytes,
            store=self._count.store if self.store is None else self.store.stats(),
        )
