"""When a tier is left alone: breaker, write limit, negative cache, measured bandwidth."""

import sys
import threading
import time

import pytest

from expertmesh.actors.state.item import Kind, Name
from expertmesh.actors.state.tiers.bandwidth import Bandwidth
from expertmesh.actors.state.tiers.breaker import Breaker, WriteLimit
from expertmesh.actors.state.tiers.negative import NegativeCache
from tests.support.tiers import FakeClock

NAME = Name(bytes(32), Kind.PAGE)


def opened(clock: FakeClock) -> Breaker:
    breaker = Breaker(clock, limit=3, first_s=1.0, most_s=3.0)
    for _ in range(3):
        assert breaker.allow()
        breaker.failed()
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = Breaker(FakeClock(), limit=2)
    for _ in range(5):
        breaker.failed()
        breaker.succeeded()
    assert breaker.allow() and not breaker.tripped
    breaker.failed()
    breaker.failed()
    assert not breaker.allow() and breaker.opened == 1


def test_after_the_pause_one_probe_decides() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    assert breaker.open and not breaker.allow()
    clock.now += 1.0
    assert breaker.allow() and not breaker.allow()  # one probe at a time
    breaker.succeeded()
    assert breaker.allow() and not breaker.tripped


def test_failed_probes_double_the_pause_up_to_a_limit() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    for pause in (1.0, 2.0, 3.0, 3.0):
        clock.now += pause - 0.01
        assert not breaker.allow()
        clock.now += 0.01
        assert breaker.allow()
        breaker.failed()
    clock.now += 3.0
    assert breaker.allow()
    breaker.succeeded()
    for _ in range(3):
        breaker.failed()
    clock.now += 1.0
    assert breaker.allow()  # a success has reset the pause


def test_an_abandoned_probe_leaves_room_for_the_next() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 1.0
    assert breaker.allow()
    breaker.abandoned()
    assert breaker.allow()


def test_stragglers_do_not_prolong_the_pause() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.now += 0.9
    breaker.failed()  # asked before it opened
    clock.now += 0.1
    assert breaker.allow()


def test_write_limit_refills_and_never_blocks_for_ever() -> None:
    clock = FakeClock()
    limit = WriteLimit(clock, per_second=100, burst=1000)
    assert limit.take(5000)  # larger than the bucket, which is full
    assert not limit.take(1)
    clock.now += 41
    assert limit.take(50)
    assert limit.take(1_000, owed=True)  # what is owed goes at others' expense
    assert not limit.take(1)
    clock.now += 1000
    assert limit.take(1000)
    assert not limit.take(1)


def test_absence_is_believed_for_a_while_and_one_generation() -> None:
    clock = FakeClock()
    absent = NegativeCache(clock, ttl_s=30)
    absent.add(NAME)
    assert NAME in absent
    absent.forget(NAME)
    assert NAME not in absent
    absent.add(NAME)
    absent.next_generation()
    assert NAME not in absent
    absent.add(NAME)
    clock.now += 31
    assert NAME not in absent


def test_of_what_is_absent_the_oldest_is_forgotten_first() -> None:
    clock = FakeClock()
    absent = NegativeCache(clock, ttl_s=30, most=3)
    names = [Name(bytes([at]) * 32, Kind.PAGE) for at in range(5)]
    for name in [*names[:3], names[0], names[3]]:
        absent.add(name)
    assert [name in absent for name in names] == [True, False, True, True, False]
    clock.now += 31
    absent.add(names[4])
    assert len(absent) == 1


def test_absence_can_be_asked_for_while_it_changes() -> None:
    """By the engine's thread, which takes no lock for it."""
    absent, failed, end = NegativeCache(time.monotonic), list[Exception](), time.monotonic() + 0.5

    def ask() -> None:
        try:
            while time.monotonic() < end:
                assert (NAME in absent) in (True, False)
        except Exception as error:
            failed.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive():
            absent.add(NAME)
            absent.forget(NAME)
        asking.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed


def test_bandwidth_learns_latency_and_rate() -> None:
    speed = Bandwidth(5e9, 2e-5)
    for _ in range(200):
        for nbytes in (10_000, 4_000_000):
            speed.measured(nbytes, 0.002 + nbytes / 1e8)
    assert speed.seconds(1_000_000) == pytest.approx(0.012, rel=0.02)
    assert speed.seconds(8_000_000, reads=10) == pytest.approx(0.1, rel=0.02)


def test_bandwidth_of_reads_of_one_size() -> None:
    speed = Bandwidth(5e9, 2e-5)
    for _ in range(1000):
        speed.measured(50_000, 0.001)
    assert speed.seconds(500_000, reads=10) == pytest.approx(0.01, rel=0.05)
