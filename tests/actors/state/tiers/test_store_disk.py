"""The store with a disk that does as it is told."""

import threading
from pathlib import Path

import pytest

from expertmesh.actors.state.disk.log import DiskLog
from expertmesh.actors.state.item import Item, Kind
from expertmesh.actors.state.settings import StateSettings
from expertmesh.actors.state.tiers import store as tiers_store
from expertmesh.actors.state.tiers.store import TieredStore
from tests.actors.state.tiers.conftest import Open
from tests.support.tiers import (
    LAYOUT,
    PAGE_BYTES,
    FakeDisk,
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


@pytest.fixture(autouse=True)
def small_transit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a host tier of few pages can be had."""
    monkeypatch.setattr(tiers_store, "TRANSIT_BYTES", 0)


def idle(store: TieredStore) -> None:
    until(lambda: not store.stats().host.queued and not store.stats().disk.queued)


@pytest.mark.parametrize("codec", ["raw", "lossless", "int8", "int4"])
def test_what_is_durable_outlives_the_process(tmp_path: Path, codec: str) -> None:
    settings = StateSettings.model_validate({"codec": codec})

    def start() -> TieredStore:
        log = DiskLog.open(tmp_path, capacity=64 << 20, layout=LAYOUT.fingerprint)
        return TieredStore(LAYOUT, settings, disk=log)

    items = [*pages("a", 6), snapshot("a", 5), session("s", 9)]
    store = start()
    assert store.durable and put(store, items, durable=True)
    assert finished(store.flush()).items == []
    store.close()
    store = start()
    assert {store.where(name) for name in names(items)} == {"disk"}
    fetch = finished(store.fetch(names(items), 20.0))
    assert fetch.items is not None and all(map(same, items, fetch.items))
    assert {item.tier for item in fetch.items} == {"disk"} and fetch.nbytes and fetch.verify_seconds
    fetch.cancel()
    exact = codec in ("raw", "lossless")
    assert store.where(items[0].header.name, exact=False) == "host"
    assert store.where(items[0].header.name) == ("host" if exact else "disk")
    loaded = finished(store.fetch(names(items), 20.0, exact=False)).items
    assert loaded is not None and {item.tier for item in loaded} == {"host"}
    assert [item.exact for item in loaded] == [exact] * 6 + [True] * 2
    again = finished(store.fetch(names(items), 20.0)).items
    assert again is not None and all(map(same, items, again))
    store.close()
    assert store.stats().threads_dead == 0


def test_only_what_was_seen_twice_is_written_for_the_caches_sake(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk)
    once, twice, used, touched = (page(tag, 0) for tag in ("once", "twice", "used", "touched"))
    for item in (once, twice, used, touched):
        assert store.put(item)
    idle(store)
    assert not disk.records
    assert store.put(twice)
    finished(store.fetch(names([used]), 20.0)).cancel()
    store.touch(names([touched]))
    until(lambda: set(disk.records) == set(names([twice, used, touched])))
    idle(store)
    assert once.header.name not in disk.records


def test_seen_before_it_came_counts(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk)
    store.touch(names([page("a", 0)]))
    until(lambda: store._host.seen.count(page("a", 0).header.name) == 1)
    assert store.put(page("a", 0))
    idle(store)
    assert set(disk.records) == set(names([page("a", 0)]))


def test_writes_for_the_caches_sake_are_limited(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk, write_bytes_per_s=PAGE_BYTES / 5)  # two at once, then one in 5 s
    for item in pages("a", 20):
        assert store.put(item) and store.put(item)
    assert store.put(page("owed", 0), durable=True)
    assert finished(store.flush()).items == []
    idle(store)
    assert 1 <= len(disk.records) - 1 <= 3
    assert store.where(page("owed", 0).header.name) == "host"
    assert store.stats().disk.refused >= 17


def test_demotes_by_copying_first(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk, host_bytes=32 * PAGE_BYTES)
    disk.writing.clear()
    items = [page(f"{at}", 0) for at in range(31)]
    for item in items:
        press(store, item)
        press(store, item)
    until(lambda: not store.stats().host.queued)
    # The disk hangs: nothing has left host memory without a copy.
    assert {store.where(name) for name in names(items)} == {"host"}
    disk.writing.set()
    idle(store)
    places = [store.where(name) for name in names(items)]
    assert None not in places and places.count("disk") >= 8
    loaded = finished(store.fetch(names(items), 20.0)).items
    assert loaded is not None and all(map(same, items, loaded))


def test_promotes_what_is_read(open_store: Open) -> None:
    disk = FakeDisk()
    first = open_store(disk)
    items = pages("a", 4)
    assert put(first, items, durable=True)
    finished(first.flush())
    store = open_store(disk)
    finished(store.fetch(names(items), 20.0)).cancel()
    assert [store.where(name) for name in names(items)] == ["host"] * 4
    finished(store.fetch(names(items), 20.0)).cancel()
    assert len(disk.reads) == 4  # the second time came from host memory
    assert store.stats().disk.hits == 4 and store.stats().host.hits == 4


def test_loads_of_one_item_share_a_read(open_store: Open) -> None:
    disk = FakeDisk()
    first = open_store(disk)
    items = pages("a", 3)
    assert put(first, items, durable=True)
    finished(first.flush())
    store = open_store(disk)
    disk.reading.clear()
    fetches = [store.fetch(names(items), 20.0) for _ in range(5)]
    until(lambda: len(disk.started) == 3)
    fetches[0].cancel()  # the first to ask is not the only one who wants it
    disk.reading.set()
    for fetch in fetches[1:]:
        loaded = finished(fetch).items
        assert loaded is not None and all(map(same, items, loaded))
    assert sorted(disk.reads) == sorted(names(items))


def test_nobody_waits_for_all_of_anothers_load(open_store: Open) -> None:
    disk = FakeDisk()
    first = open_store(disk)
    many, few = pages("many", 400), pages("few", 2)
    for item in [*many, *few]:
        press(first, item, durable=True)
    finished(first.flush())
    store = open_store(disk)
    disk.reading.clear()
    long = store.fetch(names(many), 20.0)
    until(lambda: len(disk.started) == 3 * 64)  # all readers are busy
    short = store.fetch(names(few), 20.0)
    disk.reading.set()
    finished(short)
    finished(long)
    order = [disk.reads.index(name) for name in names(few)]
    assert max(order) < 5 * 64


def test_a_newer_manifest_of_another_replica_wins(open_store: Open) -> None:
    disk = FakeDisk()
    ours, theirs = open_store(disk), open_store(disk)
    assert ours.put(session("s", 1), durable=True)
    finished(ours.flush())
    assert theirs.put(session("s", 2), durable=True)
    finished(theirs.flush())
    name = session("s", 1).header.name
    assert ours.where(name) == "disk"
    loaded = finished(ours.fetch([name], 20.0)).items
    assert loaded is not None and same(session("s", 2), loaded[0])
    assert ours.where(name) == "host" and ours.positions(Kind.SESSION) == {name: 2}


def test_keeps_and_pins_what_is_there_already(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk)
    items = pages("a", 3)
    assert put(store, items)
    missing = page("b", 0).header.name
    assert store.keep([*names(items), missing], pinned=True) == [missing]
    assert finished(store.flush()).items == []
    assert set(disk.records) == disk.pinned == set(names(items))
    store.drop(names(items))
    idle(store)
    assert set(disk.records) == set(names(items))
    store.unpin(names(items))
    store.drop(names(items)[:1])
    idle(store)
    assert disk.pinned == set() and set(disk.records) == set(names(items)[1:])
    assert store.keep(names(items)[1:], pinned=True) == []
    assert finished(store.flush()).items == []
    assert disk.pinned == set(names(items)[1:])


def test_a_lossy_page_is_kept_whole_on_the_disk(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk, codec="int4")
    items = pages("a", 4)
    assert put(store, items)
    idle(store)
    assert set(disk.records) == set(names(items))
    assert store.keep(names(items)) == [] and finished(store.flush()).items == []


def test_a_dropped_item_is_owed_no_more(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk)
    disk.writing.clear()
    items = pages("a", 3)
    assert put(store, items, durable=True)
    flush = store.flush()
    store.drop(names(items))
    disk.writing.set()
    assert finished(flush).items == []
    idle(store)
    until(lambda: not disk.records)


def test_looks_at_what_others_have_written(open_store: Open) -> None:
    disk = FakeDisk()
    store = open_store(disk)
    disk.writing.clear()
    assert store.put(page("a", 0), durable=True)
    until(lambda: disk.writes == 1)
    looks = [store.look() for _ in range(3)]
    disk.writing.set()
    assert [finished(look).items for look in looks] == [[], [], []]
    assert disk.refreshes == 1  # one answers all that asked before it


def test_closing_writes_what_is_owed(open_store: Open) -> None:
    disk, before = FakeDisk(), set(threading.enumerate())
    store = open_store(disk)
    items: list[Item] = pages("a", 20)
    assert put(store, items, durable=True)
    store.close(20.0)
    assert set(disk.records) == set(names(items)) and disk.closed
    assert not set(threading.enumerate()) - before
