"""Snapshots in pages that nobody else needs: the same bytes, and never at others' expense."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expertmesh.actors.model.config import parse_config
from expertmesh.actors.state.device import DeviceState
from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.lending import Lending
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.pages import NOBODY, SharedPool
from tests.support.checkpoints import config_dict
from tests.support.state_session import Session, ids, session
from tests.support.tiers import page

ONE_PLACE = {"snapshots": 1, "ladder_tokens": 4096}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layers", [4, 7, 9])
def test_any_bytes_come_back(layers: int, dtype: torch.dtype) -> None:
    config = parse_config(config_dict(num_hidden_layers=layers, kv_lora_rank=24))
    state = ModelState(config, 64, 2, dtype, snapshots=3)
    lending = Lending(state)
    assert lending.pages > 1 or layers == 9
    every = torch.Generator().manual_seed(layers)
    for saved in (state.saved_kda, state.saved_conv):
        raw = saved.view(torch.uint8)
        raw.copy_(torch.randint(256, raw.shape, dtype=torch.uint8, generator=every))
    state.caches.fill_(7.0)
    pages = list(range(60, 60 - 3 * lending.pages, -3))  # neither neighbours nor in order
    lending.write(2, pages)
    state.saved_kda[:, 2], state.saved_conv[:, 2] = 0, 0
    kda, conv = torch.zeros_like(state.kda[:, 1]), torch.zeros_like(state.conv[:, 1])
    lending.read(pages, kda, conv)
    state.saved_kda[:, 2], state.saved_conv[:, 2] = kda, conv
    again = torch.Generator().manual_seed(layers)
    for saved in (state.saved_kda, state.saved_conv):
        raw = saved.view(torch.uint8)
        expected = torch.randint(256, raw.shape, dtype=torch.uint8, generator=again)
        assert torch.equal(raw, expected)
    others = [page for page in range(64) if page not in pages]
    assert bool((state.paged()[:, others] == 7).all())
    assert bool((state.caches[:, state.spare_row :] == 7).all())


def test_a_pool_gives_only_what_was_idle_for_longer() -> None:
    lost: list[int] = []
    pool = SharedPool("page", 4, lost.append)
    for now in range(1, 4):
        pool.now = now
        (page,) = pool.take(now, 1)
        pool.keep(page)
        pool.give_back(now, [page])
    assert pool.take_older(NOBODY, 3, time=2) is None and pool.free == 4 and not lost
    assert pool.take_older(NOBODY, 2, time=2) is not None  # the free one, and that of time 1
    assert len(lost) == 1
    pool.check()


def lent(one: Session) -> int:
    return one.engine.stats().cache.lent_pages


def test_more_snapshots_than_places() -> None:
    one = session(pages=64, state=ONE_PLACE)
    prompts = [ids(seed, 150) for seed in range(6)]
    for at, prompt in enumerate(prompts):
        assert one.ask(f"first {at}", prompt) == 0
    assert lent(one) == 5 and one.engine.stats().cache.evicted_snapshots == 0
    for at, prompt in enumerate(prompts):
        assert one.ask(f"again {at}", prompt) == 128
    assert one.engine.stats().cache.hits_by_tier == {"hot": 6 * 128}


def test_whoever_needs_the_pages_has_them() -> None:
    one = session(pages=16, state=ONE_PLACE)
    for seed in range(4):
        one.ask(f"first {seed}", ids(seed, 150))
    assert lent(one) == 3
    assert one.ask("all pages", ids(9, 16 * 64 - 8)) == 0
    assert lent(one) == 0
    one.engine.cache.device.check()


def test_pages_that_were_used_later_are_not_for_a_snapshot() -> None:
    one = session(pages=9, state=ONE_PLACE)
    one.ask("old", ids(1, 150))
    for at in range(2):  # its snapshot is older than all pages, and none is free
        assert one.ask(f"new {at}", ids(2, 6 * 64 + 10)) == (384 if at else 0)
    assert lent(one) == 0 and one.engine.stats().cache.evicted_snapshots == 1
    assert one.ask("new again", ids(2, 6 * 64 + 10)) == 384


def test_a_lent_snapshot_is_read_before_its_pages_are_others() -> None:
    """Two that start in one step: one from a snapshot in pages, the other with these pages."""
    one = session(pages=12, state=ONE_PLACE)
    one.ask("a", ids(1, 150))
    one.ask("b", ids(2, 150))  # that of a lies in a page
    assert lent(one) == 1
    one.submit("a again", ids(1, 150))
    one.submit("all other pages", ids(3, 9 * 64 - 8))
    one.step()
    assert len(one.engine.scheduler.running) == 2 and lent(one) <= 1
    one.finish()
    one.check_all()
    assert one.cached["a again"] == 128


def test_superseded_ones_are_dropped() -> None:
    one = session(pages=64, state=ONE_PLACE)
    text = ids(1, 600)
    for turn in range(1, 5):
        assert one.ask(f"turn {turn}", text[: 140 * turn]) == max(0, 140 * (turn - 1) // 64 * 64)
    assert lent(one) == 0


def test_lent_ones_are_saved_below_and_withdrawn_like_others() -> None:
    one = session(pages=64, state=ONE_PLACE)
    device = one.engine.cache.device
    one.ask("a", ids(1, 150))
    (node,) = (node for node in device.tree if node.saved)
    before = [x.clone() for x in device.saved(node)]
    one.ask("b", ids(2, 150))
    assert node.lent and all(map(torch.equal, before, device.saved(node)))
    (item,) = device.items([Name(node.key, Kind.SNAPSHOT)])
    assert all(map(torch.equal, before, item.parts))
    device.forget_page(node.page)
    assert lent(one) == 0 and not node.saved
    device.check()
    assert one.ask("a again", ids(1, 150)) == 0


def test_evict_takes_lent_ones_first() -> None:
    one = session(pages=64, state=ONE_PLACE)
    for seed in range(3):
        one.ask(f"{seed}", ids(seed, 150))
    one.engine.cache.evict(pages=0, snapshots=2)
    assert lent(one) == 0 and one.engine.stats().cache.snapshots == 1
    assert one.ask("the newest", ids(2, 150)) == 128


def test_one_page_taken_is_all_of_it_given_back() -> None:
    config = parse_config(config_dict(num_hidden_layers=7, kv_lora_rank=24))
    device = DeviceState(ModelState(config, 40, 1, torch.float32, snapshots=1))
    each = Lending(device.state).pages
    assert each > 2
    headers = [page("lent", at).header for at in range(3)]
    for header in headers:
        place = device.take_place()
        assert place is not None
        assert device.name_snapshot(header, place) is not None
        device.tick()
    assert device.tree.lent_pages == 2 * each == device.pages.idle
    device.check()
    device.pages.take(1, device.pages.free - 2 * each + 1)
    assert device.tree.lent_pages == each and device.evicted_snapshots == 1
    assert not device.has(Name(headers[0].key, Kind.SNAPSHOT))
    assert device.pages.free == 2 * each - 1
    device.check()


MOVES = st.lists(
    st.tuples(st.sampled_from(["save", "take", "give", "use", "evict", "page"]), st.integers(0, 7)),
    min_size=20,
    max_size=80,
)


@given(MOVES)
def test_a_snapshot_is_whole_or_gone(moves: list[tuple[str, int]]) -> None:
    config = parse_config(config_dict(num_hidden_layers=7, kv_lora_rank=24))
    device = DeviceState(ModelState(config, 24, 1, torch.float32, snapshots=2))
    each, state = Lending(device.state).pages, device.state
    headers = [page("moves", at).header for at in range(8)]
    held: list[list[int]] = []
    for move, number in moves:
        header = headers[number]
        device.tick()
        if move == "save" and not device.has(Name(header.key, Kind.SNAPSHOT)):
            place = device.take_place()
            assert place is not None
            state.saved_kda[:, place], state.saved_conv[:, place] = number, -number
            device.name_snapshot(header, place)
        elif move == "take" and device.pages.free >= 3 * number:
            held.append(device.pages.take(len(held), 3 * number))
            state.paged()[:, held[-1]] = 99.0  # whoever gets a page writes it
        elif move == "give" and held:
            device.pages.give_back(len(held) - 1, held.pop())
        elif move == "use" and (node := device.find(Name(header.key, Kind.SNAPSHOT))):
            device.used(node, deeper=number % 2 == 0)
        elif move == "evict":
            device.evict(pages=number, snapshots=number % 3)
        elif move == "page" and device.pages.free and not device.has(Name(header.key, Kind.PAGE)):
            (mine,) = device.pages.take(99, 1)
            state.paged()[:, mine] = number
            device.pages.give_back(99, [device.name_page(header, 99, mine)])
        device.check()
        known = sum(n.page >= 0 for n in device.tree) + device.tree.lent_pages
        assert device.pages.idle == known  # nothing is kept that nobody finds
        for number, header in enumerate(headers):
            node = device.tree.get(header.key)
            if node is not None and node.saved:
                kda, conv = device.saved(node)
                assert bool((kda == number).all()) and bool((conv == -number).all())
                assert len(node.lent) in (0, each)
            if node is not None and node.page >= 0:
                assert bool((device.page(node.page) == number).all())
