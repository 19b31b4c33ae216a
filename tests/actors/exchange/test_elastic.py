"""A step outlives its epochs: whatever breaks and wherever, the sums are those of one process."""

import gc
import itertools
import os
import pickle
import threading
import time
from functools import partial

import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError, MisuseError
from expertmesh.actors.exchange.settings import ExchangeSettings
from tests.actors.exchange.pool import Placement, Pool, Steward, company, walk
from tests.actors.exchange.toy import Shape, ToyBank, in_threads

LAYERS = (1, 2, 4)
LAYOUTS = ["direct", "exact", "padded", "mixed"]


def shape_of(layout: str = "direct", max_rows: int = 8, **more: int) -> Shape:
    settings = ExchangeSettings(layout=layout, deadline_s=20.0, max_rows=max_rows)
    return Shape(layers=LAYERS, settings=settings, **more)


def check(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


PLACES = [("begin", -1, 0), ("end", -1, 0)] + [
    (phase, layer, micro)
    for phase, layer, micro in itertools.product(("dispatch", "combine"), LAYERS, (0, 1))
]
SOME_PLACES = PLACES[1::3]


def break_one_step(pool: Pool, how: str, place: tuple[str, int, int]) -> None:
    """Two micro-batches, one of them in chunks; what breaks the epoch happens before `place`."""
    parts = [pool.shape.rows(19, 1), pool.shape.rows(6, 2)]
    hit = []

    def before(*now: object) -> None:
        if now == place and not hit:
            hit.append(now)
            if how == "killed":
                pool.epoch.servers[1].close()
            else:
                pool.renew()

    with pool, Steward(pool):
        pool.renew()
        exchange, want = pool.replicas[0], pool.expected(parts)
        check(walk(exchange, LAYERS, parts, before), want)
        check(walk(exchange, LAYERS, parts), want)
        assert hit and exchange.epoch == 4 and exchange.broken is None


@pytest.mark.parametrize("how", ["killed", "switched"])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_step_goes_on(how: str, place: tuple[str, int, int]) -> None:
    break_one_step(Pool(shape_of()), how, place)


@pytest.mark.parametrize("layout", ["exact", "padded", "mixed"])
@pytest.mark.parametrize("how", ["killed", "switched"])
@pytest.mark.parametrize("place", SOME_PLACES, ids=str)
def test_a_step_goes_on_in_all_layouts(layout: str, how: str, place: tuple[str, int, int]) -> None:
    break_one_step(Pool(shape_of(layout)), how, place)


class BreakingBank(ToyBank):
    """Runs out of memory in its n-th call."""

    calls_left = 0

    def partial_sum(self, layer: int, *args: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ValueError("out of memory")
        return super().partial_sum(layer, *args)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("calls", [0, 1])
def test_an_actor_that_breaks_while_it_computes(layout: str, calls: int) -> None:
    """Three times in a row: in the first epoch and in both that take over."""
    pool = Pool(shape_of(layout, max_rows=64))
    parts, make = [pool.shape.rows(9, 1), pool.shape.rows(6, 2)], pool.bank

    def breaking(placed: Placement, actor: int) -> ToyBank:
        bank = make(placed, actor)
        if len(pool.epochs) < 3 and actor == 1:
            bank.__class__ = BreakingBank
            bank.calls_left = calls  # type: ignore[attr-defined]
        return bank

    pool.bank = breaking  # type: ignore[method-assign]
    with pool, Steward(pool):
        pool.renew()
        check(walk(pool.replicas[0], LAYERS, parts), pool.expected(parts))
        assert pool.replicas[0].epoch == 6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("place", SOME_PLACES, ids=str)
def test_replicas_at_different_places_of_a_step(layout: str, place: tuple[str, int, int]) -> None:
    """Some have one micro-batch, some two, one idles, one begins its next step when all resume."""
    pool = Pool(shape_of(layout, attention=4))
    rows = pool.shape.rows
    parts = [[rows(5, 1), rows(4, 2)], [rows(17, 3)], [rows(0, 4)]]
    hit = []

    def before(*now: object) -> None:
        if now == place and not hit:
            hit.append(now)
            pool.epoch.servers[0].close()

    def work(index: int) -> None:
        want = pool.expected(parts[index])
        for turn in range(3):
            at = before if index == 0 and turn == 1 else lambda *_: time.sleep(0.0003 * index)
            check(walk(pool.replicas[index], LAYERS, parts[index], at), want)

    with pool:
        pool.renew()
        with Steward(pool):
            company(pool, {index: partial(work, index) for index in range(3)})
        assert hit and pool.replicas[0].epoch == 4


def test_the_next_epoch_may_have_other_actors_and_replicas() -> None:
    shape = shape_of(attention=2, num_experts=6)
    placements: list[Placement] = [
        dict.fromkeys(LAYERS, held)
        for held in (
            [[0, 1, 2, 3, 4, 5]],
            [[5, 4, 3], [2, 1, 0], [0, 5, 2]],
            [[0], [1], [2], [3], [4, 5]],
        )
    ]
    pool, parts = Pool(shape), [shape.rows(9, 1)]
    with pool:
        pool.renew()
        want = pool.expected(parts)
        for placed in placements:
            late = pool.add_replica()
            epoch = pool.prepare(placed)
            timer = threading.Timer(0.02, pool.switch, [epoch])
            timer.start()  # the others make a step before it, the late one has to wait for it
            work = [partial(walk, replica, LAYERS, parts) for replica in pool.replicas]
            for got in company(pool, dict(enumerate(work))):
                check(got, want)
            timer.join()
            assert late.epoch == epoch.roster.epoch


def test_a_wait_for_an_epoch_ends_and_the_next_one_is_used() -> None:
    pool = Pool(shape_of(), hold_s=0.3)
    exchange, parts = pool.replicas[0], [pool.shape.rows(5)]
    with pool:
        with pytest.raises(ExchangeError, match=r"hold.*no new epoch within 0.3 s; no epoch yet"):
            walk(exchange, LAYERS, parts)
        pool.renew()
        want = pool.expected(parts)
        check(walk(exchange, LAYERS, parts), want)
        pool.epoch.servers[0].close()
        began = time.monotonic()
        with pytest.raises(ExchangeError, match=r"layer \d, hold, step 1: no new epoch.*expert 0"):
            walk(exchange, LAYERS, parts)
        assert time.monotonic() - began < 1.5
        assert exchange.broken is not None and "expert 0" in str(exchange.broken)
        pool.renew()
        assert exchange.broken is None
        check(walk(exchange, LAYERS, parts), want)


@pytest.mark.parametrize("end", ["give_up", "close"])
def test_a_wait_can_be_ended(end: str) -> None:
    pool = Pool(shape_of())
    exchange, parts = pool.replicas[0], [pool.shape.rows(5)]
    with pool:
        pool.renew()
        want = pool.expected(parts)
        exchange.abort("expert 1 is silent")
        assert exchange.broken is not None and exchange.broken.reason == "expert 1 is silent"
        call = partial(exchange.give_up, "no room") if end == "give_up" else exchange.close
        timer = threading.Timer(0.1, call)
        timer.start()
        reason = "no room" if end == "give_up" else "the exchange is closed"
        for _ in range(2):  # while it waits, and when it comes later
            with pytest.raises(ExchangeError, match=reason):
                walk(exchange, LAYERS, parts)
        timer.join()
        if end == "give_up":
            pool.renew()
            check(walk(exchange, LAYERS, parts), want)


def test_an_idle_replica_does_not_wait_for_an_epoch() -> None:
    pool = Pool(shape_of(attention=2))
    idle, other = pool.replicas
    with pool:
        idle.join_step()  # before the first epoch
        pool.renew()
        other.abort("gone")
        end = time.monotonic() + 2
        while not idle.peer_waiting and time.monotonic() < end:
            pool.woken[0].wait(0.1)
        idle.join_step()
        assert idle.broken is not None and not idle.peer_waiting
        idle.join_step()
        pool.renew()
        parts = [pool.shape.rows(3)]
        got = company(pool, {1: partial(walk, other, LAYERS, parts)})[1]
        check(got, pool.expected(parts))


def test_epochs_that_are_not_used() -> None:
    pool = Pool(shape_of())
    exchange, parts = pool.replicas[0], [pool.shape.rows(3)]
    with pool:
        pool.renew()
        discarded, skipped, used = (pool.prepare() for _ in range(3))
        check(walk(exchange, LAYERS, parts), pool.expected(parts))
        exchange.discard(discarded.roster.epoch)
        exchange.discard(99)
        with pytest.raises(ValueError, match="epoch 4 was not offered"):
            exchange.switch(discarded.roster.epoch)
        pool.switch(used)
        for over in (pool.epochs[0], discarded, skipped):
            for thread in over.threads:
                thread.join(5)
                assert not thread.is_alive()
        with pytest.raises(ValueError, match="was not offered"):
            exchange.switch(skipped.roster.epoch)
        check(walk(exchange, LAYERS, parts), pool.expected(parts))
        assert exchange.epoch == used.roster.epoch


def test_a_wrong_call_is_not_repeated() -> None:
    pool = Pool(shape_of())
    exchange, batch = pool.replicas[0], pool.shape.rows(3)
    with pool:
        for wrong in range(4):
            pool.renew()
            if wrong:
                exchange.begin_step(3)
            if wrong == 2:
                pending = exchange.dispatch(1, *batch)
                exchange.combine(pending)
            with pytest.raises(MisuseError):
                if wrong == 0:
                    exchange.end_step()
                elif wrong == 1:
                    exchange.begin_step(3)
                elif wrong == 2:
                    exchange.combine(pending)
                else:
                    exchange.dispatch(3, *batch)
            assert isinstance(exchange.broken, ExchangeError)
        pool.renew()
        check(walk(exchange, LAYERS, [batch]), pool.expected([batch]))


def test_nothing_of_a_dead_epoch_remains() -> None:
    """Threads and descriptors after 5 and after 50 more switches, without the cycle collector."""
    shape = shape_of(attention=2, experts=3)
    pool, parts = Pool(shape), [shape.rows(3)]

    def switches(count: int) -> tuple[int, int]:
        for _ in range(count):
            pool.renew()
            for over in pool.epochs[:-1]:
                for thread in over.threads:
                    thread.join(5)
            del pool.epochs[:-1], over, thread
            in_threads([partial(walk, replica, LAYERS, parts) for replica in pool.replicas])
        time.sleep(0.1)  # gloo's own threads end beside us
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    with pool:
        pool.renew()
        gc.disable()
        try:
            before, after = switches(5), switches(50)
        finally:
            gc.enable()
    assert after[0] <= before[0] + 3 and after[1] <= before[1] + 3


def test_an_error_reaches_another_process_whole() -> None:
    for kind in (ExchangeError, MisuseError):
        copy = pickle.loads(pickle.dumps(kind(3, 7, "combine", 12, "expert 1: gone")))
        assert (
            type(copy) is kind and str(copy) == "rank 3, layer 7, combine, step 12: expert 1: gone"
        )
        assert (copy.rank, copy.layer, copy.phase, copy.step) == (3, 7, "combine", 12)


def test_seconds_are_those_of_all_epochs() -> None:
    pool = Pool(shape_of())
    exchange, parts = pool.replicas[0], [pool.shape.rows(7)]
    with pool:
        assert exchange.version == -1 and exchange.rows_sent == []
        pool.renew()
        walk(exchange, LAYERS, parts)
        spent = exchange.dispatch_s, exchange.combine_s
        pool.renew()
        assert (exchange.dispatch_s, exchange.combine_s) == spent and min(spent) > 0
        assert exchange.rows_sent == [0, 0]
        walk(exchange, LAYERS, parts)
        assert exchange.dispatch_s > spent[0] and sum(exchange.rows_sent) > 0
