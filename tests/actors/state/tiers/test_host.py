"""What host memory keeps, and what gives way."""

import random

import pytest

from expertmesh.actors.state.item import Item, Kind, Name
from expertmesh.actors.state.tiers.content import store_packed
from expertmesh.actors.state.tiers.entry import Entry, State
from expertmesh.actors.state.tiers.host import BITE, HostTier
from tests.support.tiers import names, page, pages, session, snapshot

ROOMY = 1 << 30
STORED = store_packed(page("any", 0), "raw")[1].nbytes
SNAPSHOT_STORED = store_packed(snapshot("any", 0), "raw")[1].nbytes


def keep(host: HostTier, item: Item, times: int = 1) -> Entry:
    """A committed entry that was seen so often."""
    _, content = store_packed(item, "raw")
    entry = host.add(item.header, content)
    host.commit(entry, content)
    for _ in range(times):
        host.touch(entry)
    return entry


def eaten(host: HostTier) -> list[Name]:
    """The order in which everything would leave."""
    order = []
    while (entry := host.order.pop()) is not None:
        order.append(entry.name)
        host.evict(entry)
    return order


def test_a_chain_is_eaten_from_its_tip_and_snapshots_before_their_pages() -> None:
    host = HostTier(ROOMY)
    items = [*pages("a", 4), snapshot("a", 1), snapshot("a", 3)]
    random.Random(1).shuffle(items)
    for item in items:
        keep(host, item)
    order = eaten(host)
    assert set(order) == set(names(items))
    gone = {name: at for at, name in enumerate(order)}
    for at in range(3):
        below, above = page("a", at).header.name, page("a", at + 1).header.name
        assert gone[above] < gone[below]
    for at in (1, 3):
        state, ground = snapshot("a", at).header.name, page("a", at).header.name
        assert gone[state] < gone[ground]


def test_what_was_used_last_goes_last() -> None:
    host = HostTier(ROOMY)
    entries = [keep(host, page(tag, 0)) for tag in "abc"]
    host.touch(entries[0])
    assert eaten(host) == [entry.name for entry in (*entries[1:], entries[0])]


def conversation(host: HostTier, tag: str, turns: int) -> list[Entry]:
    """One page and one snapshot per turn; the snapshots."""
    states = []
    for at in range(turns):
        keep(host, page(tag, at), 0)
        states.append(keep(host, snapshot(tag, at), 0))
    return states


def test_only_the_newest_snapshot_of_a_conversation_is_likely() -> None:
    host = HostTier(ROOMY)
    old = conversation(host, "old", 3)
    new = conversation(host, "new", 3)
    gone = [name for name in eaten(host) if name.kind is Kind.SNAPSHOT]
    assert gone == [old[0].name, old[1].name, new[0].name, new[1].name, old[2].name, new[2].name]


def test_where_conversations_part_is_likely_again() -> None:
    host = HostTier(ROOMY)
    states = conversation(host, "a", 4)
    host.touch(states[1])
    host.touch(states[1])
    gone = [name for name in eaten(host) if name.kind is Kind.SNAPSHOT]
    assert gone[:2] == [states[0].name, states[2].name]
    assert set(gone[2:]) == {states[1].name, states[3].name}


def test_even_the_unlikely_outlive_what_was_long_unused() -> None:
    host = HostTier(ROOMY)
    old = keep(host, snapshot("old", 0), 0)
    for at in range(100):
        keep(host, snapshot(f"filler {at}", 0), 0)
    states = conversation(host, "a", 2)
    gone = [name for name in eaten(host) if name.kind is Kind.SNAPSHOT]
    assert gone.index(old.name) < gone.index(states[0].name)


def test_answers_give_way_to_prompts() -> None:
    host = HostTier(ROOMY)
    keep(host, page("answer", 0, "decode"))
    keep(host, page("prompt", 0))
    assert eaten(host)[0] == page("answer", 0).header.name


def test_held_pinned_owed_and_unpacked_items_stay() -> None:
    host = HostTier(ROOMY)
    entries = [keep(host, page(tag, 0)) for tag in "abcd"]
    host.hold(entries[0])
    host.pin(entries[1], True)
    entries[2].durable = True
    _, content = store_packed(page("e", 0), "raw")
    host.add(page("e", 0).header, content)
    assert eaten(host) == [entries[3].name]
    host.release(entries[0])
    host.pin(entries[1], False)
    entries[2].durable = False
    host.order.offer(entries[2])
    assert set(eaten(host)) == {entry.name for entry in entries[:3]}
    with pytest.raises(ValueError, match="more often"):
        host.release(entries[0])


def test_pages_and_snapshots_lend_each_other_their_half() -> None:
    host = HostTier(100 * STORED)
    for at in range(80):
        keep(host, page(f"p {at}", 0), 3)
    assert len(host.entries) == 80  # no snapshot needs its half
    snapshots = 40 * STORED // SNAPSHOT_STORED
    for at in range(snapshots):
        keep(host, snapshot(f"s {at}", 0))
    host.reclaim(0)
    # Pages were seen three times as often, but had more than their half.
    assert abs(host.order.bytes[Kind.SNAPSHOT] - host.order.bytes[Kind.PAGE]) <= STORED


def test_reclaims_from_the_high_watermark_to_the_low_one() -> None:
    host = HostTier(100 * STORED)
    for at in range(85):
        keep(host, page(f"{at}", 0))
    assert host.reclaim(0) == [] and len(host.entries) == 85
    keep(host, page("more", 0))
    host.reclaim(0)
    assert len(host.entries) == 70
    assert host.stats().evictions == 16


def test_reclaims_a_bite_at_a_time() -> None:
    host = HostTier(1000 * STORED)
    for at in range(900):
        keep(host, page(f"{at}", 0))
    host.reclaim(0)
    assert len(host.entries) == 900 - BITE
    host.reclaim(0)
    assert len(host.entries) == 700  # below the high watermark it goes on to the low one
    host.reclaim(0)
    assert len(host.entries) == 700


def test_what_was_seen_twice_is_copied_before_it_leaves() -> None:
    host = HostTier(100 * STORED)
    for at in range(90):
        keep(host, page(f"{at}", 0), 2)
    leaving = host.reclaim(copies=12)
    assert len(leaving) == 12 and len(host.entries) == 82  # of 20 to leave, 8 find no room below
    assert all(host.entries[name].state is State.EVICTING for name in leaving)
    host.hold(host.entries[leaving[0]])  # somebody wants it: it stays
    assert host.entries[leaving[0]].state is State.COMMITTED
    for name in leaving[1:]:
        host.evict(host.entries[name])
    assert host.used == 71 * STORED


def test_above_the_capacity_nothing_waits_for_a_copy() -> None:
    host = HostTier(10 * STORED)
    for at in range(10):
        keep(host, page(f"{at}", 0), 2)
    assert len(host.reclaim(copies=99)) == 3
    for at in range(10, 20):
        keep(host, page(f"{at}", 0), 2)
    host.reclaim(copies=99)
    assert host.used <= 10 * STORED


def test_what_the_disk_has_needs_no_copy() -> None:
    host = HostTier(10 * STORED, below=lambda name: True)
    for at in range(10):
        keep(host, page(f"{at}", 0), 2)
    assert host.reclaim(copies=99) == []
    assert host.used == 7 * STORED


def test_accounts_for_every_byte() -> None:
    host = HostTier(ROOMY)
    rng = random.Random(3)
    entries: list[Entry] = []
    for step in range(600):
        if entries and rng.random() < 0.4:
            host.remove(entries.pop(rng.randrange(len(entries))))
        else:
            tag = f"{step}"
            kinds = (page(tag, 0), snapshot(tag, 0), session(tag, 7))
            entries.append(keep(host, rng.choice(kinds), rng.randrange(3)))
    stats = host.stats()
    total = stats.page_bytes + stats.snapshot_bytes + stats.other_bytes
    assert total == sum(entry.content.nbytes for entry in entries) == host.used
    assert stats.raw_bytes == sum(entry.content.raw_bytes for entry in entries)
    assert stats.items == len(entries)
    assert len(eaten(host)) == len(entries)
    assert host.used == 0 and not host.order.bytes.total()


def test_a_name_has_one_entry() -> None:
    host = HostTier(ROOMY)
    keep(host, page("a", 0))
    with pytest.raises(ValueError, match="already"):
        keep(host, page("a", 0))
