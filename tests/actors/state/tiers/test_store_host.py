"""The store with host memory alone."""

import gc
import threading
from typing import Any

import pytest

from expertmesh.actors.state.item import Item, Kind
from expertmesh.actors.state.tiers import packer
from expertmesh.actors.state.tiers.content import Stored
from tests.actors.state.tiers.conftest import Open
from tests.support.tiers import (
    PAGE_BYTES,
    FakeClock,
    finished,
    names,
    page,
    pages,
    press,
    put,
    same,
    session,
    snapshot,
    until,
)


@pytest.mark.parametrize("codec", ["raw", "lossless"])
def test_gives_back_every_bit(open_store: Open, codec: str) -> None:
    woken = threading.Event()
    store = open_store(codec=codec, wake=woken.set)
    items = [*pages("a", 6), snapshot("a", 5), session("s", 3)]
    assert put(store, items)
    until(lambda: not store.stats().host.queued)
    fetch = store.fetch(names(items), 20.0)
    assert woken.wait(20.0) and fetch.done and not fetch.reason
    loaded = fetch.items
    assert loaded is not None
    assert all(map(same, items, loaded))
    assert {item.tier for item in loaded} == {"host"} and all(item.exact for item in loaded)
    assert fetch.nbytes == sum(item.nbytes for item in loaded)
    assert [item.raw_bytes for item in loaded] == [item.nbytes for item in items]
    stats = store.stats().host
    assert stats.hits == stats.reads == len(items) and stats.pinned == len(items)
    fetch.cancel()
    assert store.stats().host.pinned == 0
    assert fetch.items is None


def test_what_is_not_packed_yet_can_be_read(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    pack = packer.store_packed

    def slow(item: Item, codec: Any) -> Any:
        assert gate.wait(20.0)
        return pack(item, codec)

    monkeypatch.setattr(packer, "store_packed", slow)
    store = open_store()
    items = pages("a", 3)
    assert put(store, items)
    assert [store.where(name) for name in names(items)] == ["host"] * 3
    loaded = finished(store.fetch(names(items), 20.0)).items
    assert loaded is not None and all(map(same, items, loaded))
    gate.set()
    until(lambda: not store.stats().host.queued)
    assert store.stats().host.writes == 3


def test_an_item_whose_packing_fails_is_a_miss(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(item: Item, codec: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(packer, "store_packed", fails)
    store = open_store()
    assert store.put(page("a", 0))
    until(lambda: store.where(page("a", 0).header.name) is None)
    assert store.stats().host.failures == {"pack": 1}
    monkeypatch.undo()
    assert store.put(page("a", 0))
    until(lambda: not store.stats().host.queued)
    assert store.stats().threads_dead == 0


def test_an_item_that_the_device_never_writes_is_a_miss(open_store: Open) -> None:
    class Never:
        def query(self) -> bool:
            return False

    store = open_store(write_timeout_s=0.05)
    item = page("a", 0)
    late: Any = Never()
    assert store.put(Item(item.header, item.parts, late))
    fetch = finished(store.fetch([item.header.name], 0.01))
    assert fetch.reason in ("timeout", "corrupt")
    until(lambda: store.where(item.header.name) is None)


def test_all_or_nothing(open_store: Open) -> None:
    store = open_store()
    items = pages("a", 3)
    assert put(store, items)
    fetch = store.fetch([*names(items), page("a", 3).header.name], 20.0)
    assert fetch.done and fetch.items is None and fetch.reason == "missing"
    until(lambda: not store.stats().host.queued)
    assert store.stats().host.pinned == 0
    assert finished(store.fetch([], 20.0)).items == []


def test_bytes_that_something_wrote_into_are_a_miss(open_store: Open) -> None:
    store = open_store(codec="raw")
    items = pages("a", 3)
    assert put(store, items)
    until(lambda: not store.stats().host.queued)
    packed = store._host.entries[items[1].header.name].content.packed
    assert packed is not None
    packed.data[-99] ^= 1
    fetch = finished(store.fetch(names(items), 20.0))
    assert fetch.items is None and fetch.reason == "corrupt"
    stats = store.stats().host
    assert stats.failures == {"corrupt": 1} and stats.misses == 1 and stats.pinned == 0
    assert [store.where(name) for name in names(items)] == ["host", None, "host"]


def test_a_fetch_that_nobody_serves_ends_by_itself(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate = threading.Event(), threading.Event()

    def hangs(self: Stored, timeout_s: float) -> bool:
        begun.set()
        return gate.wait(20.0)

    monkeypatch.setattr(Stored, "verified", hangs)
    clock = FakeClock()
    store = open_store(clock=clock)
    assert store.put(page("a", 0))
    until(lambda: not store.stats().host.queued)
    fetch = store.fetch([page("a", 0).header.name], 2.0)
    assert begun.wait(20.0) and not fetch.done
    clock.now += 2.0
    assert fetch.done and fetch.reason == "timeout" and fetch.items is None
    gate.set()
    until(lambda: store.stats().host.reads == 1)
    assert store.stats().host.pinned == 0 and store.stats().host.failures == {"timeout": 1}


def test_cancelled_and_forgotten_fetches_let_go(open_store: Open) -> None:
    store = open_store()
    items = pages("a", 4)
    assert put(store, items)
    fetch = store.fetch(names(items), 20.0)
    fetch.cancel()
    fetch.cancel()
    assert fetch.done and fetch.items is None and store.stats().host.pinned == 0
    forgotten = finished(store.fetch(names(items), 20.0))
    assert store.stats().host.pinned == 4
    del forgotten
    gc.collect()
    until(lambda: store.stats().host.pinned == 0)


def test_host_memory_never_holds_more_than_its_budget(open_store: Open) -> None:
    capacity = 64 * PAGE_BYTES
    store = open_store(host_bytes=capacity)
    for at in range(640):
        item = page(f"{at}", 0)
        press(store, item)
        assert store.stats().host.page_bytes <= 1.3 * capacity  # a quarter may wait unpacked
    until(lambda: not store.stats().host.queued)
    stats = store.stats().host
    assert stats.page_bytes <= 0.86 * capacity and stats.evictions + stats.items == 640
    large = page("large", 0)
    assert not store.put(Item(large.header, (large.parts[0].repeat(65, 1, 1),)))


def test_the_queue_is_bounded_in_items_and_bytes(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(packer, "arrived", lambda item, timeout_s: gate.wait(20.0))
    store = open_store(queue=3)
    taken = [store.put(item) for item in pages("a", 8)]
    # One may be in the packer's hands.
    assert taken.count(True) in (3, 4) and not taken[-1]
    assert store.stats().host.refused == taken.count(False)
    small = open_store(host_bytes=8 * PAGE_BYTES)
    assert [small.put(item) for item in pages("b", 4)] == [True, True, False, False]
    gate.set()


def test_held_items_outlive_the_demand(open_store: Open) -> None:
    store = open_store(host_bytes=16 * PAGE_BYTES)
    held = pages("held", 8)
    for item in held:
        press(store, item)
    fetch = finished(store.fetch(names(held), 20.0))
    for at in range(200):
        item = page(f"{at}", 0)
        press(store, item)
    until(lambda: not store.stats().host.queued)
    loaded = fetch.items
    assert loaded is not None and all(map(same, held, loaded))
    assert [store.where(name) for name in names(held)] == ["host"] * 8
    fetch.cancel()


def test_a_manifest_replaces_the_one_before(open_store: Open) -> None:
    store = open_store()
    for version in (1, 2, 3):
        assert store.put(session("s", version))
    name = session("s", 3).header.name
    loaded = finished(store.fetch([name], 20.0)).items
    assert loaded is not None and same(session("s", 3), loaded[0])
    assert store.positions(Kind.SESSION) == {name: 3} and store.positions(Kind.PAGE) == {}
    store.drop([name])
    assert store.where(name) is None


def test_pinned_items_stay_and_are_not_dropped(open_store: Open) -> None:
    store = open_store(host_bytes=32 * PAGE_BYTES)
    items = pages("a", 4)
    assert put(store, items, pinned=True)
    for at in range(200):
        item = page(f"{at}", 0)
        press(store, item)
    store.drop(names(items))
    assert [store.where(name) for name in names(items)] == ["host"] * 4
    store.unpin(names(items))
    store.pin(names(items)[:1])
    store.drop(names(items))
    assert [store.where(name) for name in names(items)] == ["host", None, None, None]


def test_without_a_disk_nothing_is_owed(open_store: Open) -> None:
    store = open_store()
    assert not store.durable
    assert store.put(page("a", 0), durable=True)
    assert finished(store.flush()).items == [] and finished(store.look()).items == []
    assert store.keep(names(pages("a", 2))) == names([page("a", 1)])


def test_estimates_how_long_a_load_takes(open_store: Open) -> None:
    store = open_store()
    items = pages("a", 8)
    assert put(store, items)
    few, many = store.load_seconds(names(items[:1])), store.load_seconds(names(items))
    assert 0 < few < many < 1
    assert store.load_seconds(names([page("b", 0)])) == float("inf")


def test_after_close_everything_is_a_miss_and_no_thread_is_left(open_store: Open) -> None:
    store = open_store()
    assert store.put(page("a", 0))
    store.close()
    store.close()
    assert not store.put(page("a", 1))
    assert finished(store.fetch(names([page("a", 0)]), 1.0)).reason == "closed"
    assert store.stats().threads_dead == 0
