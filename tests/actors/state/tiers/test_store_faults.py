"""Whatever fails below the device is a miss with a reason, in time, and the rest goes on."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from expertmesh.actors.state.item import Item
from expertmesh.actors.state.tiers import content, loads
from expertmesh.actors.state.tiers import store as tiers_store
from expertmesh.actors.state.tiers.store import TieredStore
from tests.actors.state.tiers.conftest import Open
from tests.support.tiers import (
    PAGE_BYTES,
    FakeClock,
    FakeDisk,
    broken_device,
    finished,
    names,
    page,
    pages,
    press,
    put,
    same,
    until,
)


@pytest.fixture(autouse=True)
def small_transit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a host tier of few pages can be had."""
    monkeypatch.setattr(tiers_store, "TRANSIT_BYTES", 0)


@pytest.fixture
def on_disk(open_store: Open) -> Callable[[FakeDisk, list[Item]], None]:
    def save(disk: FakeDisk, items: list[Item]) -> None:
        store = open_store(disk)
        for item in items:
            press(store, item, durable=True)
        assert finished(store.flush()).items == []

    return save


OnDisk = Callable[[FakeDisk, list[Item]], None]


def reasons(store: TieredStore, items: list[Item]) -> list[str]:
    """Of fetches one after the other."""
    return [finished(store.fetch(names([item]), 20.0)).reason for item in items]


def test_a_failing_device_is_left_alone_and_tried_again(open_store: Open, on_disk: OnDisk) -> None:
    disk, clock = FakeDisk(), FakeClock()
    items = pages("a", 8)
    on_disk(disk, items)
    store = open_store(disk, clock)
    disk.failing = broken_device()
    assert reasons(store, items[:5]) == ["io", "io", "io", "busy", "busy"]
    assert len(disk.started) == 3  # nothing is asked of it now
    assert store.load_seconds(names(items)) == float("inf")
    assert store.stats().disk.failures["io"] == 3
    disk.failing = None
    # What failed is not believed to be there until the device has shown that it works.
    assert [store.where(name) for name in names(items[:4])] == [None, None, None, "disk"]
    clock.now += 1.0
    assert reasons(store, items[4:5]) == [""]
    assert [store.where(name) for name in names(items[:4])] == ["disk"] * 4
    loaded = finished(store.fetch(names(items), 20.0)).items
    assert loaded is not None and all(map(same, items, loaded))
    assert store.stats().threads_dead == 0


def test_a_damaged_record_is_a_miss_of_the_whole_fetch(open_store: Open, on_disk: OnDisk) -> None:
    disk = FakeDisk()
    items = pages("a", 5)
    on_disk(disk, items)
    store = open_store(disk)
    disk.damaged = {items[2].header.name}
    fetch = finished(store.fetch(names(items), 20.0))
    assert fetch.items is None and fetch.reason == "missing"
    assert store.stats().disk.misses == 1
    fetch = finished(store.fetch(names(items[:2]), 20.0))
    assert fetch.items is not None and all(map(same, items, fetch.items))


@pytest.mark.parametrize("change", ["key", "layout", "payload"])
def test_strange_records_are_refused(open_store: Open, on_disk: OnDisk, change: str) -> None:
    disk = FakeDisk()
    one, other = page("one", 0), page("other", 0)
    on_disk(disk, [one, other])
    name = one.header.name
    record, strange = disk.records[name], disk.records[other.header.name]
    if change == "key":
        disk.records[name] = strange
    elif change == "layout":
        disk.records[name] = replace(record, header=replace(record.header, layout=bytes(16)))
    else:
        disk.records[name] = replace(record, payload=record.payload[:-1])
    store = open_store(disk)
    assert reasons(store, [one]) == ["corrupt"]
    assert store.stats().disk.failures == {"corrupt": 1}


def test_a_read_that_hangs_costs_its_deadline_and_nobody_else_anything(
    open_store: Open, on_disk: OnDisk
) -> None:
    disk, clock = FakeDisk(), FakeClock()
    items, warm = pages("cold", 6), pages("warm", 3)
    on_disk(disk, items)
    store = open_store(disk, clock)
    assert put(store, warm)
    disk.reading.clear()
    stuck = [store.fetch(names([item]), 2.0) for item in items[:4]]
    until(lambda: len(disk.started) == 3)
    # Host memory answers while the disk hangs.
    loaded = finished(store.fetch(names(warm), 2.0)).items
    assert loaded is not None and all(map(same, warm, loaded))
    assert not any(fetch.done for fetch in stuck)
    clock.now += 2.0
    assert all(fetch.done and fetch.reason == "timeout" for fetch in stuck)
    assert finished(store.fetch(names(items[4:]), 2.0)).reason == "busy"  # at once
    assert store.where(items[0].header.name) is None
    # What comes late is kept, and shows nothing wrong with the names.
    disk.reading.set()
    until(lambda: store.stats().host.items == 6)
    clock.now += 2.0
    loaded = finished(store.fetch(names(items), 20.0)).items
    assert loaded is not None and all(map(same, items, loaded))
    until(lambda: store.stats().host.pinned == 0)


def test_after_a_read_that_hangs_the_next_one_reads_anew(open_store: Open, on_disk: OnDisk) -> None:
    disk, clock = FakeDisk(), FakeClock()
    items = pages("a", 1)
    on_disk(disk, items)
    store = open_store(disk, clock)
    disk.reading.clear()
    late = store.fetch(names(items), 2.0)
    until(lambda: disk.started == names(items))
    clock.now += 2.0
    assert late.done and late.reason == "timeout"
    clock.now += 30.0  # it is believed to be there again, and the first reader still hangs
    again = store.fetch(names(items), 2.0)
    until(lambda: disk.started == 2 * names(items))
    disk.reading.set()
    loaded = finished(again).items
    assert loaded is not None and all(map(same, items, loaded))


def test_a_full_disk_stops_writes_and_nothing_else(open_store: Open, on_disk: OnDisk) -> None:
    disk = FakeDisk()
    old = pages("old", 3)
    on_disk(disk, old)
    disk.full = True
    store = open_store(disk)
    new = pages("new", 3)
    assert put(store, new, durable=True)
    flush = finished(store.flush())
    assert flush.items is None and flush.reason == "full"
    assert store.stats().disk.failures["full"] >= 1 and store.stats().disk.read_only == "full"
    loaded = finished(store.fetch(names([*old, *new]), 20.0)).items
    assert loaded is not None and all(map(same, [*old, *new], loaded))
    disk.full = False
    assert store.keep(names(new)) == []
    assert finished(store.flush()).items == []
    assert set(names(new)) < set(disk.records) and store.stats().disk.read_only == ""


def test_a_full_disk_does_not_fill_host_memory(open_store: Open) -> None:
    disk = FakeDisk(full=True)
    capacity = 32 * PAGE_BYTES
    store = open_store(disk, host_bytes=capacity)
    for at in range(300):
        press(store, page(f"{at}", 0), durable=at % 2 == 0)
    until(lambda: not store.stats().host.queued and not store.stats().disk.queued)
    stats = store.stats()
    assert stats.host.page_bytes <= 0.86 * capacity and stats.host.items >= 20
    assert finished(store.flush()).reason == "full"
    assert finished(store.flush()).items == []  # told once


def test_a_write_that_hangs_closes_the_tier_for_a_while(open_store: Open) -> None:
    disk, clock = FakeDisk(), FakeClock()
    store = open_store(disk, clock, write_timeout_s=5.0)
    disk.writing.clear()
    assert store.put(page("a", 0), durable=True)
    until(lambda: disk.writes == 1)
    assert store.put(page("a", 1), durable=True)
    until(lambda: not store.stats().host.queued)
    flush = store.flush()
    clock.now += 5.0
    assert finished(flush).reason == "timeout"
    until(lambda: store.stats().disk.read_only == "slow")
    assert not store.put(page("a", 2), durable=True)  # but host memory has it
    assert store.where(page("a", 2).header.name) == "host"
    assert store.keep(names([page("a", 1)])) == names([page("a", 1)])
    disk.writing.set()
    until(lambda: store.stats().disk.read_only == "failing")
    assert set(disk.records) == set(names([page("a", 0)]))  # late is not lost
    clock.now += 1.0
    assert store.stats().disk.read_only == ""
    finished(store.flush())
    assert store.keep(names(pages("a", 3))) == []
    assert finished(store.flush()).items == []
    assert set(disk.records) == set(names(pages("a", 3)))


def test_a_failing_write_is_told_by_the_flush(open_store: Open) -> None:
    disk, clock = FakeDisk(failing=broken_device()), FakeClock()
    store = open_store(disk, clock)
    assert put(store, pages("a", 3), durable=True)
    assert finished(store.flush()).reason == "io"
    until(lambda: not store.stats().disk.queued)
    disk.failing = None
    clock.now += 60.0
    assert store.keep(names(pages("a", 3))) == [] and finished(store.flush()).items == []


def test_a_removal_survives_a_failing_disk(open_store: Open, on_disk: OnDisk) -> None:
    disk, clock = FakeDisk(), FakeClock()
    items = pages("a", 2)
    on_disk(disk, items)
    store = open_store(disk, clock)
    disk.failing = broken_device()
    press(store, page("b", 0), durable=True)
    until(lambda: store.stats().disk.failures.get("io", 0) > 0)
    store.drop(names(items))
    disk.failing = None
    clock.now += 60.0
    until(lambda: not disk.records)


@pytest.mark.parametrize("dead", ["disk-read", "disk-write"])
def test_a_dead_thread_is_counted_and_its_tier_does_without(
    open_store: Open, on_disk: OnDisk, dead: str
) -> None:
    disk = FakeDisk()
    items = pages("a", 6)
    on_disk(disk, items)
    store = open_store(disk)
    disk.dying = True
    if dead == "disk-read":
        ended = reasons(store, items[:3])
        assert set(ended) == {"error"}
        until(lambda: store.stats().threads_dead == 3)
        until(lambda: store.where(items[5].header.name) is None)  # at once, without waiting
        assert finished(store.fetch(names(items), 20.0)).reason == "missing"
    else:
        assert store.put(page("b", 0), durable=True)
        until(lambda: store.stats().threads_dead == 1)
        assert finished(store.flush()).reason
        until(lambda: "dead" in store.stats().disk.read_only)
        assert not store.put(page("b", 1), durable=True)
        disk.dying = False
        loaded = finished(store.fetch(names(items), 20.0)).items
        assert loaded is not None and all(map(same, items, loaded))
    assert store.put(page("c", 0)) and store.where(page("c", 0).header.name) == "host"


def test_a_dead_packer_turns_host_memory_read_only(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from expertmesh.actors.state.tiers import packer

    store = open_store()
    assert put(store, pages("a", 2))
    until(lambda: not store.stats().host.queued)

    def dies(item: Item, codec: object) -> None:
        raise SystemExit("a thread dies")

    monkeypatch.setattr(packer, "store_packed", dies)
    assert store.put(page("b", 0))
    until(lambda: "dead" in store.stats().host.read_only)
    assert store.stats().threads_dead == 1 and not store.put(page("b", 1))
    loaded = finished(store.fetch(names(pages("a", 2)), 20.0)).items
    assert loaded is not None and all(map(same, pages("a", 2), loaded))


def test_reads_take_no_more_host_memory_than_there_is(
    open_store: Open, on_disk: OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "STAGING_BYTES", 0)
    disk = FakeDisk()
    items = pages("a", 8), pages("b", 8)
    on_disk(disk, [*items[0], *items[1]])
    store = open_store(disk, host_bytes=12 * PAGE_BYTES)
    first = finished(store.fetch(names(items[0]), 20.0))
    assert not first.reason
    second = finished(store.fetch(names(items[1]), 20.0))
    assert second.reason == "busy"  # and not a buffer that was never filled
    first.cancel()
    second = finished(store.fetch(names(items[1]), 20.0))
    assert second.items is not None and all(map(same, items[1], second.items))
    second.cancel()
    large = finished(store.fetch(names([*items[0], *items[1]]), 20.0))
    assert large.items is not None  # alone it always has room


def test_a_fetch_that_is_refused_lets_go_of_loads_it_shares(
    open_store: Open, on_disk: OnDisk
) -> None:
    disk = FakeDisk()
    items = pages("a", 2)
    on_disk(disk, items)
    store = open_store(disk)
    disk.reading.clear()
    first = store.fetch(names(items), 20.0)
    refused = store.fetch([*names(items), page("nowhere", 0).header.name], 20.0)
    assert refused.done and refused.reason == "missing"
    disk.reading.set()
    loaded = finished(first).items
    assert loaded is not None and all(map(same, items, loaded))
    first.cancel()
    assert store.in_use == (0, 0, 0)


def test_host_memory_is_read_on_as_long_as_one_reader_lives(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    items = pages("a", 2)
    assert put(store, items)
    until(lambda: not store.stats().host.queued)
    intact = content.Stored.verified

    def dies(stored: content.Stored, timeout_s: float) -> bool:
        raise SystemExit("a thread dies")

    for dead in (1, 2):
        monkeypatch.setattr(content.Stored, "verified", dies)
        assert finished(store.fetch(names(items), 0.3)).reason == "timeout"
        until(lambda: store.stats().threads_dead == dead)  # noqa: B023
        monkeypatch.setattr(content.Stored, "verified", intact)
        if dead == 1:
            loaded = finished(store.fetch(names(items), 20.0)).items
            assert loaded is not None and all(map(same, items, loaded))
            assert store.put(page("b", 0))
    until(lambda: "dead" in store.stats().host.read_only)
    assert not store.put(page("b", 1))
