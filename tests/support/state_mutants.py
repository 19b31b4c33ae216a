"""Mistakes that engines with cached hybrid state have made, to be put into ours.

Each is a function that changes one thing through pytest's monkeypatch. The tests that use them show
that what they check would be noticed.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch
from pytest import MonkeyPatch

from expertmesh.actors.attention.scheduler import Scheduler
from expertmesh.actors.model import batch
from expertmesh.actors.state import cache, device, keys, lookup, prefix
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.device import DeviceState
from expertmesh.actors.state.item import Header, Item, Kind
from expertmesh.actors.state.lookup import Lookup
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.prefix import Prefix, Start
from tests.support.state_store import Loading, MemoryStore, Stored

Mutant = Callable[[MonkeyPatch], None]


def transposed_between_chunks(patch: MonkeyPatch) -> None:
    def restore(self: ModelState, slot: int, snapshot: int) -> None:
        self.kda[:, slot] = self.saved_kda[:, snapshot].transpose(-1, -2)
        self.conv[:, slot] = self.saved_conv[:, snapshot]

    patch.setattr(ModelState, "restore", restore)


def cut_off_the_grid(patch: MonkeyPatch) -> None:
    def chunk_end(self: Scheduler, seq: Any, budget: int) -> int:
        return min(seq.chunk_end + budget, seq.prompt_len)

    patch.setattr(Scheduler, "_chunk_end", chunk_end)


def named_when_scheduled(patch: MonkeyPatch) -> None:
    begin = StateCache.begin

    def early(self: StateCache, seqs: Any, grown: Any = ()) -> None:
        begin(self, seqs, grown)
        for seq in seqs:
            whole = prefix.last_start(seq.prompt_len) // batch.PAGE_TOKENS
            for at in range(seq.prefix.published, whole):
                header = seq.prefix.header(Kind.PAGE, at, seq.tokens)
                seq.pages[at] = self.device.name_page(header, seq.number, seq.pages[at])
            place = self.device.take_place() if whole > seq.prefix.published else None
            if place is not None:
                header = seq.prefix.header(Kind.SNAPSHOT, whole - 1, seq.tokens)
                self.device.name_snapshot(header, place)

    patch.setattr(StateCache, "begin", early)


def recycled_slots(patch: MonkeyPatch) -> None:
    patch.setattr(ModelState, "zero_slot", lambda self, slot: None)


def snapshot_written_in_place(patch: MonkeyPatch) -> None:
    """As if the sequence went on in the snapshot itself."""
    restore, arrived = ModelState.restore, StateCache.arrived
    shared: list[tuple[ModelState, int, int]] = []

    def remember(self: ModelState, slot: int, snapshot: int) -> None:
        restore(self, slot, snapshot)
        shared.append((self, slot, snapshot))

    def write(self: StateCache) -> None:
        for state, slot, snapshot in shared:
            state.saved_kda[:, snapshot] = state.kda[:, slot]
        shared.clear()
        arrived(self)

    patch.setattr(ModelState, "restore", remember)
    patch.setattr(StateCache, "arrived", write)


def stored_from_another_page(patch: MonkeyPatch) -> None:
    page = DeviceState.page
    patch.setattr(DeviceState, "page", lambda self, at: page(self, (at + 1) % self.pages.size))


def conv_not_restored(patch: MonkeyPatch) -> None:
    layer = Stored.layer

    def only_first(self: Stored, part: int, index: int, out: torch.Tensor) -> None:
        if part == 0:
            layer(self, part, index, out)

    patch.setattr(Stored, "layer", only_first)


def snapshot_of_another_length(patch: MonkeyPatch) -> None:
    """The state's name is made from how far the pages reach."""
    starts = Lookup._starts

    def longer(self: Lookup, seq: Any, pages: int, have: Any, below: bool) -> Any:
        found = []
        for start in starts(self, seq, pages, have, below):
            *names, snapshot = start.names
            more = batch.PAGE_TOKENS * (len(names) + 1)
            if more <= prefix.last_start(seq.readable + 1) and names:
                page = prefix.Name(seq.prefix.key(len(names), seq.tokens), Kind.PAGE)
                if have(page) or self.device.has(page):
                    start = Start(more, [*names, page, snapshot])
            found.append(start)
        return iter(found)

    patch.setattr(Lookup, "_starts", longer)


def state_of_the_whole_prompt(patch: MonkeyPatch) -> None:
    """A hit stops before the prompt's last token, and yet the state is the one behind it."""
    here = Lookup.here

    def behind(self: Lookup, seq: Any) -> Start:
        start = here(self, seq)
        if start.names and start.position + batch.PAGE_TOKENS == seq.prompt_len:
            key = seq.prefix.key(len(start.names) - 1, seq.tokens)
            snapshot = prefix.Name(key, Kind.SNAPSHOT)
            if self.device.has(snapshot):
                return Start(start.position, [*start.names[:-1], snapshot])
        return start

    patch.setattr(Lookup, "here", behind)


def saved_at_the_end_of_the_chunk(patch: MonkeyPatch) -> None:
    pieces = batch.kda_pieces

    def late(spans: Any) -> Any:
        made, _ = pieces([dataclasses.replace(span, saves=()) for span in spans])
        return made, [(n, place) for n, span in enumerate(spans) for _, place in span.saves]

    patch.setattr(batch, "kda_pieces", late)


def never_saved(patch: MonkeyPatch) -> None:
    pieces = batch.kda_pieces
    patch.setattr(batch, "kda_pieces", lambda spans: (pieces(spans)[0], []))


def saved_in_bf16(patch: MonkeyPatch) -> None:
    name = DeviceState.name_snapshot

    def rounded(self: DeviceState, header: Any, place: int, rung: bool = False) -> Any:
        saved = self.state.saved_kda[:, place]
        saved.copy_(saved.to(torch.bfloat16))
        return name(self, header, place, rung)

    patch.setattr(DeviceState, "name_snapshot", rounded)


def loads_not_waited_for(patch: MonkeyPatch) -> None:
    """What is loaded comes after the step that reads it."""
    gate, layer = threading.Event(), Stored.layer
    begin, arrived = StateCache.begin, StateCache.arrived

    def shut(self: StateCache, seqs: Any, grown: Any = ()) -> None:
        gate.clear()
        begin(self, seqs, grown)

    def slow(self: Stored, part: int, index: int, out: torch.Tensor) -> None:
        assert gate.wait(30)
        layer(self, part, index, out)

    def ended(self: StateCache) -> None:
        gate.set()
        arrived(self)

    patch.setattr(Stored, "layer", slow)
    patch.setattr(ModelState, "wait", lambda self, layer: None)
    patch.setattr(StateCache, "begin", shut)
    patch.setattr(StateCache, "arrived", ended)


def graphs_do_not_wait(patch: MonkeyPatch) -> None:
    """As above, for passes that are replayed."""
    wait = ModelState.wait
    loads_not_waited_for(patch)
    patch.setattr(ModelState, "wait", wait)
    patch.setattr(ModelState, "arrive", lambda self: None)


def begins_where_it_once_could(patch: MonkeyPatch) -> None:
    """The first answer to where it can begin is kept, whatever is evicted meanwhile."""
    here = Lookup.here

    def cached(self: Lookup, seq: Any) -> Start:
        if seq.prefix.start == prefix.NOWHERE:
            seq.prefix.start = here(self, seq)
        return seq.prefix.start

    patch.setattr(Lookup, "here", cached)


def keeps_believing_in_a_load(patch: MonkeyPatch) -> None:
    take_over, where = Lookup._take_over, dict[Any, Any]()

    def again(self: Lookup, seq: Any) -> None:
        failed = self._count.loads_failed
        take_over(self, seq)
        seq.prefix.looked = self._count.loads_failed == failed

    def believe(self: MemoryStore, name: Any) -> Any:
        return (
            where.setdefault(name, self.stored[name].tier)
            if name in self.stored
            else where.get(name)
        )

    patch.setattr(Lookup, "_take_over", again)
    patch.setattr(MemoryStore, "where", believe)


def one_load_holds_up_all(patch: MonkeyPatch) -> None:
    attach = StateCache.attach
    patch.setattr(
        StateCache,
        "attach",
        lambda self, seq, first=True: None if self.loading else attach(self, seq, first),
    )


def asks_once(patch: MonkeyPatch) -> None:
    patch.setattr(lookup, "MOST_ASKS", 1)


def idle_by_what_still_loads(patch: MonkeyPatch) -> None:
    patch.setattr(StateCache, "waiting", property(lambda self: self.loading))


def dense_snapshots(patch: MonkeyPatch) -> None:
    patch.setattr(cache, "ladder", lambda length, step: prefix.ladder(length, batch.PAGE_TOKENS))
    patch.setattr(cache, "thin", lambda positions, tip, step: positions)


def long_blocks(patch: MonkeyPatch) -> None:
    starts = Lookup._starts
    patch.setattr(Lookup, "_starts", lambda self, seq, pages, have, below: iter([
        start for start in starts(self, seq, pages, have, below) if start.position % 512 == 0
    ]))  # fmt: skip


def weak_names(patch: MonkeyPatch) -> None:
    """A hash that looks at lengths alone: all that stands between prompts is the comparison."""
    extend = keys.extend

    def weak(parent: bytes, tokens: Any, end: int, switches: Any = ()) -> bytes:
        return extend(parent, [0] * len(tokens), end, switches)

    patch.setattr(keys, "extend", weak)


def weak_names_not_compared(patch: MonkeyPatch) -> None:
    weak_names(patch)
    patch.setattr(Prefix, "agrees", lambda self, of, tokens: True)


def another_request_s_items(patch: MonkeyPatch) -> None:
    """A store whose loads bring what was asked for by someone else."""
    fetch = MemoryStore.fetch

    def swapped(self: MemoryStore, names: Any, timeout_s: float, exact: bool = True) -> Loading:
        load = fetch(self, names, timeout_s, exact)
        if load.found:
            load.found = [
                next(o for n, o in reversed(self.stored.items()) if n.kind is mine.header.kind)
                for mine in load.found
            ]
        return load

    patch.setattr(MemoryStore, "fetch", swapped)


def failed_counts_as_done(patch: MonkeyPatch) -> None:
    """The buffers of a load that has failed are used as if it had not."""
    fetch = MemoryStore.fetch

    def unloaded(self: MemoryStore, names: Any, timeout_s: float, exact: bool = True) -> Loading:
        known = [self.stored[name] for name in names]
        load = fetch(self, names, timeout_s, exact)
        if load.found is None:
            load.found = [
                Stored(Item(each.header, tuple(map(torch.zeros_like, each.item.parts))), 0)
                for each in known
            ]
        return load

    patch.setattr(MemoryStore, "fetch", unloaded)


def stored_without_a_copy(patch: MonkeyPatch) -> None:
    """What is handed to the store is the device's own memory, which goes on changing."""

    def view(header: Header, tensors: Any) -> Item:
        return Item(header, tuple(tensors))

    for module in (cache, device):
        patch.setattr(module, "take_out", view)


def places_not_given_back(patch: MonkeyPatch) -> None:
    patch.setattr(DeviceState, "give_place_back", lambda self, place: None)


def broken_pages_stay_known(patch: MonkeyPatch) -> None:
    patch.setattr(StateCache, "withdraw", lambda self, seq: None)


def one_tenant_for_all(patch: MonkeyPatch) -> None:
    patch.setattr(cache, "root_key", lambda mark, tenant="", mode="": keys.root_key(mark))


def budget_not_in_the_name(patch: MonkeyPatch) -> None:
    init = StateCache.__init__

    def plain(self: StateCache, *args: Any) -> None:
        init(self, *args[:4])

    patch.setattr(StateCache, "__init__", plain)


def path_not_in_the_name(patch: MonkeyPatch) -> None:
    extend = keys.extend

    def bare(parent: bytes, tokens: Any, end: int, switches: Any = ()) -> bytes:
        return extend(parent, tokens, end)

    patch.setattr(keys, "extend", bare)
