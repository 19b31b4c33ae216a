"""Several epochs over one bank: which one counts, what its end means, what it has cost."""

import threading
from typing import Any

import pytest

from expertmesh.actors.exchange.base import ExchangeError
from expertmesh.actors.exchange.roster import Roster
from expertmesh.actors.exchange.serve import LayerWork
from expertmesh.actors.experts.serving import Epochs
from expertmesh.actors.process import Pulse


class Server:
    """Runs until told how to end."""

    def __init__(self, roster: Roster) -> None:
        self.version_floor = roster.version
        self.steps, self.work = 0, {1: LayerWork(), 3: LayerWork()}
        self.failure: Exception | None = None
        self.done, self.closed = threading.Event(), threading.Event()

    def run(self) -> None:
        assert self.done.wait(20)
        if self.closed.is_set():
            raise ExchangeError(1, -1, "open", self.steps, "this rank has closed the epoch")
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        self.closed.set()
        self.done.set()

    def end(self, failure: Exception | None = None) -> None:
        self.failure = failure
        self.done.set()

    def serve(self, rows: int) -> None:
        self.steps += 1
        self.work[3].rows += rows
        self.work[3].calls += 1
        self.work[3].busy_s += 0.5


class Tier:
    """Epochs over fake servers; `prepare` starts one, `gone` waits for its thread."""

    def __init__(self) -> None:
        self.servers: dict[int, Server] = {}
        self.epochs = Epochs(self._meet)
        self.before_met: Any = None

    def _meet(self, roster: Roster, rank: int) -> Any:
        if self.before_met is not None:
            self.before_met()
        server = self.servers[roster.epoch] = Server(roster)
        return server

    def prepare(self, epoch: int, version: int = 0) -> Server:
        self.epochs.prepare(Roster(epoch, 1, 1, {1: [[0]], 3: [[0]]}, ("", 0), version), 1)
        return self.servers[epoch]

    def gone(self, epoch: int) -> None:
        for thread in threading.enumerate():
            if thread.name == f"expert-epoch-{epoch}":
                thread.join(10)
                assert not thread.is_alive()


@pytest.fixture
def tier() -> Any:
    made = Tier()
    yield made
    made.epochs.close()
    for epoch in made.servers:
        made.gone(epoch)


def test_the_next_epoch_takes_over_without_a_failure(tier: Tier) -> None:
    assert tier.epochs.pulse() == Pulse()
    old = tier.prepare(4)
    assert tier.epochs.pulse() == Pulse(4)
    tier.prepare(5)
    assert tier.epochs.pulse() == Pulse(5)
    assert not old.closed.is_set(), "the old one is served until it is retired"
    tier.epochs.retire(5)
    assert old.closed.is_set()
    tier.gone(4)
    assert tier.epochs.pulse() == Pulse(5)


def test_the_end_of_the_only_epoch_is_told_with_its_reason(tier: Tier) -> None:
    tier.prepare(4).end(ValueError("no such layer"))
    tier.gone(4)
    assert tier.epochs.pulse() == Pulse(4, "ValueError: no such layer")
    tier.prepare(5)
    assert tier.epochs.pulse() == Pulse(5), "whatever was before, this one runs"
    tier.epochs.retire(5)
    tier.servers[5].end()
    tier.gone(5)
    assert tier.epochs.pulse() == Pulse(5, "the attention side has ended the epoch")


def test_a_prepared_epoch_that_is_discarded_leaves_the_old_one_as_it_was(tier: Tier) -> None:
    old, new = tier.prepare(4), tier.prepare(5)
    tier.epochs.discard(5)
    assert new.closed.is_set()
    tier.gone(5)
    assert tier.epochs.pulse() == Pulse(4)
    old.end(RuntimeError("lost"))
    tier.gone(4)
    assert tier.epochs.pulse() == Pulse(4, "RuntimeError: lost")
    with pytest.raises(ExchangeError, match="epoch 5 is no longer wanted"):
        tier.prepare(5)


def test_a_prepared_epoch_that_breaks_before_its_turn_does_not_count(tier: Tier) -> None:
    tier.prepare(4)
    tier.prepare(5).end(RuntimeError("another rank died"))
    tier.gone(5)
    assert tier.epochs.pulse() == Pulse(4)


@pytest.mark.parametrize("how", ["discard", "retire"])
def test_an_epoch_given_up_while_it_is_met_never_runs(tier: Tier, how: str) -> None:
    tier.prepare(4)
    tier.before_met = lambda: tier.epochs.discard(5) if how == "discard" else tier.epochs.retire(6)
    with pytest.raises(ExchangeError, match="epoch 5 is no longer wanted"):
        tier.prepare(5)
    assert tier.servers[5].closed.is_set()
    assert all(thread.name != "expert-epoch-5" for thread in threading.enumerate())


def test_work_outlives_its_epoch(tier: Tier) -> None:
    old = tier.prepare(4)
    old.serve(10)
    new = tier.prepare(5)
    new.serve(7)
    for _ in range(2):  # with the old one alive, and after its end
        work = tier.epochs.work()
        assert work.steps == 2
        assert (work.layers[3].rows, work.layers[3].calls, work.layers[3].busy_s) == (17, 2, 1.0)
        assert work.layers[1].rows == 0
        tier.epochs.retire(5)
        tier.gone(4)


def test_a_version_floor_reaches_every_epoch_and_never_sinks(tier: Tier) -> None:
    old, new = tier.prepare(4, version=2), tier.prepare(5, version=9)
    tier.epochs.require_version(6)
    assert (old.version_floor, new.version_floor) == (6, 9)
    tier.epochs.require_version(3)
    assert (old.version_floor, new.version_floor) == (6, 9)


def test_closing_ends_all_of_them(tier: Tier) -> None:
    servers = [tier.prepare(4), tier.prepare(7)]
    tier.epochs.close()
    assert all(server.closed.is_set() for server in servers)
    assert tier.epochs.pulse() == Pulse()
    tier.prepare(8)
    assert tier.epochs.pulse() == Pulse(8)
