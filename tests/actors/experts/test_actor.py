"""The expert actor as a plain object: what it loads, serves, moves and says of itself."""

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.actors.exchange.base import ExchangeError, LocalExchange
from expertmesh.actors.exchange.mesh import MeshExchange
from expertmesh.actors.exchange.process_group import open_store
from expertmesh.actors.exchange.roster import Roster, Routing
from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.actors.process import Pulse
from tests.actors.experts.sample import EXPERTS, Sample

HOST = "127.0.0.1"
SETTINGS = ExchangeSettings(deadline_s=5.0, join_deadline_s=5.0)
HELD = ((0, 1, 2, 3), (4, 5, 6))


class Tier:
    """Expert actors and one attention rank that walks through epochs with them."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        load = LoadSettings(model=sample.source.folder, device="cpu", expert_cache_bytes=1 << 22)
        self.actors = [ExpertActor(load, SETTINGS) for _ in HELD]
        self.placed = dict.fromkeys(sample.layers, HELD)
        self.oracle = LocalExchange(sample.bank(range(EXPERTS)))
        self._stores: list[Any] = []

    def load(self) -> list[int]:
        return [
            actor.load(dict.fromkeys(self.sample.layers, ids))
            for actor, ids in zip(self.actors, HELD, strict=True)
        ]

    def roster(self, epoch: int, version: int = 0, extra: int = 0) -> Roster:
        """extra: expert ranks that never come."""
        store, address = open_store(HOST)
        self._stores.append(store)
        placed = {layer: (*held, *[()] * extra) for layer, held in self.placed.items()}
        return Roster(epoch, 1, len(self.actors) + extra, placed, address, version)

    def meet(self, roster: Roster) -> MeshExchange:
        prepares = [
            threading.Thread(target=actor.prepare, args=(roster, rank), daemon=True)
            for rank, actor in enumerate(self.actors, 1)
        ]
        for prepare in prepares:
            prepare.start()
        config = self.sample.config
        exchange = MeshExchange(
            roster, 0, SETTINGS, width=config.latent_size, top_k=config.experts_per_token,
            num_experts=EXPERTS, host=HOST, dtype=torch.float32,
        )  # fmt: skip
        for prepare in prepares:
            prepare.join(10)
        return exchange

    def step(self, exchange: MeshExchange, rows: int, seed: int) -> Tensor:
        """One step, compared bit for bit with one process; returns the expert ids."""
        given = self.sample.rows(rows, seed)
        exchange.begin_step(rows)
        for layer in self.sample.layers:
            got = exchange.combine(exchange.dispatch(layer, *given))
            want = self.oracle.combine(self.oracle.dispatch(layer, *given))
            assert torch.equal(got, want)
        exchange.end_step()
        return given[1]


class Peer:
    def __init__(self, actor: ExpertActor) -> None:
        self.actor, self.name = actor, "expert-0"

    def give(self, layer: int, expert: int, timeout_s: float) -> Any:
        return self.actor.give(layer, expert)


@pytest.fixture
def tier(sample: Sample) -> Any:
    made = Tier(sample)
    yield made
    for actor in made.actors:
        actor.leave()


def until(condition: Any) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_loads_its_share_and_serves_what_one_process_computes(tier: Tier) -> None:
    for actor in tier.actors:
        assert actor.health() == (False, "in no epoch yet")
    sizes = tier.load()
    for actor in tier.actors:
        state = actor.progress()
        assert state.done == state.total > 0
    assert sizes[0] * 3 == sizes[1] * 4, "each holds its own experts and no others"

    exchange = tier.meet(tier.roster(5))
    assert [actor.health() for actor in tier.actors] == [(True, ""), (True, "")]
    assert [actor.pulse() for actor in tier.actors] == [Pulse(5), Pulse(5)]
    ids_TK = tier.step(exchange, 9, seed=1)
    stats = [actor.stats() for actor in tier.actors]
    for layer in tier.sample.layers:
        for stat, ids in zip(stats, HELD, strict=True):
            wanted = torch.isin(ids_TK, torch.tensor(ids)).any(1).sum().item()
            assert stat.rows[layer] == wanted, "a row counts once however many experts it wants"
    assert 0 < stats[0].busy_share < 1
    exchange.close()
    until(lambda: not any(actor.health()[0] for actor in tier.actors))
    _, reason = tier.actors[0].health()
    assert reason == tier.actors[0].stats().failed
    assert "epoch 5: the attention side has ended the epoch" in reason


def test_epochs_follow_each_other_over_the_same_experts(tier: Tier) -> None:
    tier.load()
    old = tier.meet(tier.roster(5))
    tier.step(old, 6, seed=1)
    new = tier.meet(tier.roster(6))
    for seed in range(3):  # either serves as long as both are there
        tier.step(old, 5, seed)
        tier.step(new, 7, seed)
    old.abort("epoch 6 replaces this one")
    for actor in tier.actors:
        actor.retire(6)
    until(lambda: not [t for t in threading.enumerate() if t.name == "expert-epoch-5"])
    tier.step(new, 4, seed=9)
    for actor in tier.actors:
        assert actor.pulse() == Pulse(6)
        assert actor.health() == (True, "")
        # Over both epochs. A step is counted when it ends, which may be after the last answer.
        until(lambda actor=actor: actor.stats().steps == 1 + 3 + 3 + 1)
    new.close()


def test_an_expert_moves_while_it_is_served(tier: Tier) -> None:
    """Copy, flip, drop: the result keeps its bits, and a step of before is refused by version."""
    tier.load()
    exchange = tier.meet(tier.roster(5, version=1))
    source, target = tier.actors
    halt, steps, failed = threading.Event(), [0], []

    def serve() -> None:
        try:
            while not halt.is_set():
                tier.step(exchange, 8, steps[0] % 5)
                steps[0] += 1
        except BaseException as error:
            failed.append(error)

    engine = threading.Thread(target=serve, daemon=True)
    engine.start()
    moved = 2
    for layer in tier.sample.layers:
        assert target.adopt(layer, moved, Peer(source), 10.0)
    assert target.checksums({i: [moved] for i in tier.sample.layers}) == source.checksums(
        {i: [moved] for i in tier.sample.layers}
    )
    seen = steps[0]
    until(lambda: steps[0] > seen + 5)
    tier.placed = dict.fromkeys(tier.sample.layers, ((0, 1, 3), (2, 4, 5, 6)))
    exchange.route(Routing(2, tier.placed))
    until(lambda: exchange.version == 2)
    seen = steps[0]
    until(lambda: steps[0] > seen + 5)
    source.drop({layer: [moved] for layer in tier.sample.layers}, version=2)
    seen = steps[0]
    until(lambda: steps[0] > seen + 5 or failed)
    halt.set()
    engine.join(10)
    assert not failed
    assert source.held() == dict.fromkeys(tier.sample.layers, (0, 1, 3))
    exchange.close()


def test_a_step_by_a_routing_of_before_a_drop_is_a_named_error(tier: Tier) -> None:
    tier.load()
    exchange = tier.meet(tier.roster(5, version=1))
    tier.step(exchange, 4, seed=0)
    tier.actors[0].drop({tier.sample.layers[0]: [2]}, version=2)
    with pytest.raises(ExchangeError):
        for seed in range(3):
            tier.step(exchange, 8, seed)
    until(lambda: not tier.actors[0].health()[0])
    assert "epoch 5: " in tier.actors[0].health()[1]
    assert "routing version 1" in tier.actors[0].health()[1]


def test_an_epoch_that_does_not_meet_leaves_no_thread_and_no_socket(tier: Tier) -> None:
    tier.load()
    exchange = tier.meet(tier.roster(5))
    tier.step(exchange, 4, seed=0)
    actor = tier.actors[0]
    fast = SETTINGS.model_copy(update={"join_deadline_s": 0.5})
    actor._exchange = fast
    roster = tier.roster(6, extra=1)

    def left() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with pytest.raises(ExchangeError, match="expert 0 could not join"):  # whatever the first costs
        actor.prepare(roster, 1)
    before = left()
    for _ in range(3):
        with pytest.raises(ExchangeError, match="expert 0 could not join"):
            actor.prepare(roster, 1)
    until(lambda: left() <= before)
    assert actor.pulse() == Pulse(5), "the one before is served on"
    tier.step(exchange, 4, seed=1)
    exchange.close()
