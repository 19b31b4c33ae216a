"""Where a queued sequence can begin: found once, and found to be otherwise when it is."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from expertmesh.actors.attention.messages import GenerateRequest, SamplingParams
from expertmesh.actors.attention.sequence import Sequence
from expertmesh.actors.state.cache import StateCache
from expertmesh.actors.state.item import Item, Kind
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.store import Store
from expertmesh.actors.state.tree import NOTHING, PrefixTree
from tests.support.session_store import FakeFetch, FakeStore
from tests.support.state_model import poisoned, small_model

IDS = [(7 * i + 3) % 64 for i in range(6 * 64 + 9)]


class Device:
    """A cache with the state of IDS: all pages, and a snapshot at 192 and at 384 tokens."""

    def __init__(self, store: Store | None = None, **settings: Any) -> None:
        state = poisoned(small_model().model, 20, 4, 4)
        self.cache = StateCache(state, StateSettings(host_bytes=0, **settings), b"model", store)
        self.writer = self.queued(1)
        self.pages = self.cache.pages.take(1, 6)
        for at, page in enumerate(self.pages):
            self.name_page(at, page)
        for at in (2, 5):
            place = self.cache.device.take_place()
            assert place is not None
            header = self.writer.prefix.header(Kind.SNAPSHOT, at, IDS)
            self.cache.device.name_snapshot(header, place)

    def queued(self, number: int, ids: list[int] = IDS, resumed: Iterable[int] = ()) -> Sequence:
        params = SamplingParams(max_tokens=5)
        request = GenerateRequest(f"r{number}", ids, params, resume_ids=list(resumed))
        seq = Sequence(request, number, 0, frozenset())
        self.cache.open(seq, "")
        return seq

    def name_page(self, at: int, page: int) -> None:
        header = self.writer.prefix.header(Kind.PAGE, at, IDS)
        assert self.cache.device.name_page(header, 1, page) == page

    def shared(self, seq: Sequence) -> list[int]:
        """The pages that it would read, if it began now."""
        assert self.cache.attach(seq) is not None
        shared = seq.prefix.shared
        self.cache.detach(seq)
        return shared


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    method: Callable[..., Any] = getattr(owner, name)

    def call(*args: Any) -> Any:
        calls.append(args)
        return method(*args)

    patch.setattr(owner, name, call)
    return calls


def test_what_was_found_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    seq = device.queued(2)
    looks = counted(monkeypatch, PrefixTree, "get")
    assert device.shared(seq) == device.pages and len(looks) >= 6
    looks.clear()
    assert device.shared(seq) == device.pages and looks == []
    seq.prefix.start = seq.prefix.start._replace(position=192)
    assert device.cache._wanted(seq) == [384] and looks == []


def test_what_is_gone_or_has_come_since_is_noticed() -> None:
    device = Device()
    seq, other = device.queued(2), device.queued(3, [*IDS[:200], 5, *IDS[201:]])
    assert device.shared(seq) == device.pages
    assert device.shared(other) == device.pages[:3]
    device.cache.device.forget_page(device.pages[4])
    assert device.shared(seq) == device.pages[:3]  # to the snapshot before
    device.name_page(4, device.pages[4])
    assert device.shared(seq) == device.pages
    device.cache.device.forget_page(device.pages[0])
    assert device.shared(seq) == device.shared(other) == []


def test_what_was_loaded_counts_until_it_is_let_go() -> None:
    """And a page that comes to the device meanwhile is shared."""
    store = FakeStore()
    device = Device(store)
    names = [
        *device.writer.prefix.page_names(6, IDS),
        device.writer.prefix.header(Kind.SNAPSHOT, 5, IDS).name,
    ]
    for item in device.cache.device.items(names):
        store.put(item)
    for page in (device.pages[1], device.pages[3]):
        device.cache.device.forget_page(page)
    seq = device.queued(2)
    first, _, third, _, *last = device.pages
    assert device.shared(seq) == [first, NOTHING, third, NOTHING, *last]
    assert device.cache.lookup.here(seq).position == 384
    device.name_page(3, device.pages[3])
    assert device.shared(seq) == [first, NOTHING, *device.pages[2:]]
    device.cache.lookup.stop(seq)
    assert device.cache.lookup.here(seq).position == 0


def test_who_may_not_load_yet_weighs_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    device = Device(store)
    lookup = device.cache.lookup
    for item in device.cache.device.items(device.writer.prefix.page_names(6, IDS)):
        store.put(item)
    device.cache.device.forget_page(device.pages[1])
    weighed = counted(monkeypatch, lookup, "_soonest")
    lookup._held, lookup._most_held = {9: 1000}, 1001
    seq = device.queued(2)
    for _ in range(5):
        assert device.cache.attach(seq, first=False) is None
        assert lookup.waiting == 1 and len(weighed) == 1
    lookup._held = {}
    assert device.cache.attach(seq, first=False) == 5
    assert lookup.waiting == 0 and seq.computed == 384


class Shared(FakeStore):
    """Another replica has written to its disk what a look at it brings."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Item] = []
        self.looks: list[FakeFetch] = []

    def look(self) -> FakeFetch:
        self.looks.append(FakeFetch(done=False))
        return self.looks[-1]

    def seen(self) -> None:
        """The look has ended."""
        for item in self.written:
            self.put(item)
        self.looks[-1].items, self.looks[-1].done = [], True


def test_an_heir_looks_for_what_was_written_last() -> None:
    """Whoever goes on where another replica was lost; others do not wait for what may be there."""
    store = Shared()
    device = Device(store, disk=Path("disk"), disk_bytes=64 << 20)
    device.cache.lookup._note_due = math.inf  # it was looked at just now
    end = device.writer.prefix.header(Kind.SNAPSHOT, 5, IDS).name
    names = [*device.writer.prefix.page_names(6, IDS), end]
    store.written = device.cache.device.items(names)
    for page in device.pages:
        device.cache.device.forget_page(page)
    other, heir = device.queued(2), device.queued(3, resumed=[1, 2])
    assert device.cache.attach(other) == other.computed == 0 and not store.looks
    assert device.cache.attach(heir) is None and len(store.looks) == 1
    store.seen()
    assert device.cache.attach(heir) == 0 and heir.computed == 384
    assert len(store.looks) == 1
