"""Experts move between actors: whole or not at all, within a deadline, one at a time."""

import pickle
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.experts.bank import ExpertNotHeld
from expertmesh.actors.experts.transfer import Packet, TransferError
from expertmesh.actors.model.checkpoint import CheckpointError
from expertmesh.actors.model.loading import LoadSettings
from tests.actors.experts.sample import EXPERTS, Sample, write_sample
from tests.support.checkpoints import Experts
from tests.support.tampering import shards_of

DEADLINE = 10.0
Meddle = Callable[[ExpertActor, int, int, float], Packet]


class Peer:
    """An actor of this process as a peer; `meddle` stands in the way of a packet."""

    def __init__(self, actor: ExpertActor, name: str, meddle: Meddle | None = None) -> None:
        self.actor, self.name, self.meddle = actor, name, meddle

    def give(self, layer: int, expert: int, timeout_s: float) -> Packet:
        if self.meddle is not None:
            return self.meddle(self.actor, layer, expert, timeout_s)
        return self.actor.give(layer, expert)


def actors(sample: Sample, *held: list[int]) -> list[ExpertActor]:
    load = LoadSettings(model=sample.source.folder, device="cpu", expert_cache_bytes=1 << 22)
    made = []
    for ids in held:
        actor = ExpertActor(load, ExchangeSettings())
        actor.load(dict.fromkeys(sample.layers, ids))
        made.append(actor)
    return made


def test_a_copy_computes_and_hashes_like_its_original(sample: Sample) -> None:
    source, target = actors(sample, [0, 1, 2, 3], [4, 5, 6])
    layer, peer = sample.layers[0], Peer(source, "expert-0")
    checksum = target.adopt(layer, 2, peer, DEADLINE)
    assert (
        source.checksums({layer: [2]}) == target.checksums({layer: [2]}) == {layer: {2: checksum}}
    )
    assert target.held()[layer] == (2, 4, 5, 6)
    bank, oracle = target._experts(), sample.bank([2])
    z, ids, weights = sample.rows(16)
    only = torch.where(ids == 2, ids, -1)
    got = bank.partial_sum(layer, z, only, weights)
    assert torch.equal(got, oracle.partial_sum(layer, z, only, weights))
    assert got.abs().sum() > 0
    source.drop({layer: [2]}, version=1)
    assert torch.equal(bank.partial_sum(layer, z, only, weights), got), "the copy stands alone"
    nbytes = oracle.stored(layer, 2)[0].nbytes
    gave, took = source.stats(), target.stats()
    assert (gave.transfers_out, gave.transfers_in, gave.moved_bytes) == (1, 0, nbytes)
    assert (took.transfers_out, took.transfers_in, took.moved_bytes) == (0, 1, nbytes)
    assert took.held == 3 * len(sample.layers) + 1


@pytest.mark.parametrize("experts", ["bf16", "mixed"])
def test_experts_stored_otherwise_travel_as_they_are(tmp_path: Path, experts: Experts) -> None:
    own = write_sample(tmp_path / "model", experts)
    source, target = actors(own, [0, 1, 2], [3])
    for layer in own.layers:
        for expert in (0, 1, 2):
            checksum = target.adopt(layer, expert, Peer(source, "s"), DEADLINE)
            assert source.checksums({layer: [expert]}) == {layer: {expert: checksum}}
    assert target.stats().packed_bytes == own.bank([0, 1, 2, 3]).packed_bytes


def test_received_memory_is_written_to_the_last_byte(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = actors(sample, [0, 1], [2])
    make = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **kw: make(*a, **kw).fill_(0x5A))
    layer = sample.layers[0]
    assert target.adopt(layer, 1, Peer(source, "s"), DEADLINE) == sample.bank([1]).checksum(
        layer, 1
    )


def stalled(source: ExpertActor, layer: int, expert: int, timeout_s: float) -> Packet:
    time.sleep(timeout_s)
    raise TransferError(layer, expert, "expert-0", f"no answer within {timeout_s:.1f} s")


def dead(source: ExpertActor, layer: int, expert: int, timeout_s: float) -> Packet:
    raise TransferError(layer, expert, "expert-0", "the actor died")


def late(source: ExpertActor, layer: int, expert: int, timeout_s: float) -> Packet:
    time.sleep(timeout_s)
    return source.give(layer, expert)


def astray(source: ExpertActor, layer: int, expert: int, timeout_s: float) -> Packet:
    return source.give(layer, expert + 1)


@pytest.mark.parametrize(
    ("trouble", "deadline_s", "reason"),
    [
        (stalled, 1.0, r"no answer within \d\.\d s"),
        (dead, DEADLINE, "the actor died"),
        (late, 1.0, "after the deadline"),
        (astray, DEADLINE, "expert 2 came instead"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_source_that_fails_leaves_nothing_behind(
    sample: Sample, trouble: Meddle, deadline_s: float, reason: str
) -> None:
    source, target = actors(sample, [0, 1, 2, 3], [4, 5, 6])
    layer = sample.layers[0]
    before = target.held(), target.stats().packed_bytes, target.stats().cached_bytes
    with pytest.raises(TransferError, match=reason) as caught:
        target.adopt(layer, 1, Peer(source, "expert-0", trouble), deadline_s)
    error = caught.value
    assert (error.layer, error.expert, error.source) == (layer, 1, "expert-0")
    assert str(error).startswith(f"layer {layer}, expert 1 from expert-0: ")
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.reason) == (str(error), error.reason)
    after = target.held(), target.stats().packed_bytes, target.stats().cached_bytes
    assert after == before
    assert (target.stats().transfer_failures, target.stats().checksum_failures) == (1, 0)
    assert target.adopt(layer, 1, Peer(source, "expert-0"), DEADLINE), "the next one is unaffected"


def test_one_that_is_not_there_is_named_by_its_source(sample: Sample) -> None:
    source, target = actors(sample, [0, 1], [4])
    with pytest.raises(ExpertNotHeld, match="expert 5 is not held here") as caught:
        source.give(sample.layers[0], 5)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ExpertNotHeld, match="expert 5 is not held here"):
        target.checksums({sample.layers[0]: [4, 5]})


def test_transfers_go_one_at_a_time_and_delay_nothing_else(sample: Sample) -> None:
    source, target = actors(sample, [0, 1, 2, 3], [4, 5, 6])
    layer, release, present = sample.layers[0], threading.Event(), []
    inside = threading.Semaphore(0)

    def meddle(actor: ExpertActor, layer: int, expert: int, timeout_s: float) -> Packet:
        present.append(expert)
        inside.release()
        assert release.wait(30)
        present.remove(expert)
        return actor.give(layer, expert)

    peer, results = Peer(source, "expert-0", meddle), []
    threads = [
        threading.Thread(target=lambda e=e: results.append(target.adopt(layer, e, peer, 30)))
        for e in (0, 1, 2)
    ]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=10)
    # While it hangs: it is not here, another transfer is in line, everything else answers.
    assert target.held()[layer] == (4, 5, 6)
    assert target.give(layer, 4).nbytes
    assert target.checksums({layer: [4]})
    assert target.health() == (False, "in no epoch yet")
    assert len(present) == 1
    release.set()
    for thread in threads:
        thread.join(30)
    assert target.held()[layer] == (0, 1, 2, 4, 5, 6)
    assert sorted(results) == sorted(source.checksums({layer: [0, 1, 2]})[layer].values())


def test_waiting_in_line_counts_against_the_deadline(sample: Sample) -> None:
    source, target = actors(sample, [0, 1, 2, 3], [4, 5, 6])
    layer = sample.layers[0]
    hanging = Peer(source, "expert-0", stalled)

    def hang() -> None:
        with pytest.raises(TransferError, match="no answer"):
            target.adopt(layer, 0, hanging, 2.0)

    first = threading.Thread(target=hang)
    first.start()
    time.sleep(0.5)
    with pytest.raises(TransferError, match="another transfer took all the time there was"):
        target.adopt(layer, 1, Peer(source, "expert-0"), 0.1)
    first.join()
    assert target.adopt(layer, 1, Peer(source, "expert-0"), DEADLINE)


@pytest.mark.parametrize("seed", range(4))
def test_after_any_moves_every_copy_hashes_to_its_expert(sample: Sample, seed: int) -> None:
    """Random copies and removals over four actors, several copies of some experts: no copy is the
    one of another expert, or an old one."""
    choose, pool = random.Random(seed), actors(sample, [0, 1], [2, 3], [4, 5], [6])
    peers = [Peer(actor, f"expert-{i}") for i, actor in enumerate(pool)]
    full = sample.bank(range(EXPERTS))
    good = {(i, e): full.checksum(i, e) for i in sample.layers for e in range(EXPERTS)}
    copies = {
        (layer, expert): [a for a in range(4) if expert in pool[a].held()[layer]]
        for layer, expert in good
    }
    for version in range(120):
        layer, expert = key = choose.choice([*good])
        holders = copies[key]
        if len(holders) > 1 and choose.random() < 0.5:
            gone = holders.pop(choose.randrange(len(holders)))
            pool[gone].drop({layer: [expert]}, version)
        else:
            target = choose.randrange(4)
            source = peers[choose.choice(holders)]
            assert pool[target].adopt(layer, expert, source, DEADLINE) == good[key]
            if target not in holders:
                holders.append(target)
    held = [actor.held() for actor in pool]
    for (layer, expert), holders in copies.items():
        assert holders, "never without a copy"
        assert sorted(holders) == [a for a in range(4) if expert in held[a].get(layer, ())]
    for actor, mine in zip(pool, held, strict=True):
        for layer, sums in actor.checksums(mine).items():
            assert sums == {expert: good[layer, expert] for expert in mine[layer]}


def test_missing_experts_come_from_the_checkpoint(sample: Sample) -> None:
    (actor,) = actors(sample, [0, 1])
    layer, other = sample.layers[0], sample.layers[-1]
    full = sample.bank(range(EXPERTS))
    assert actor.load_more({layer: [1, 5], other: [0, 6, 3], 99: []}) == {
        layer: (5,),
        other: (6, 3),
    }
    assert actor.held()[layer] == (0, 1, 5)
    assert actor.checksums({other: [6]}) == {other: {6: full.checksum(other, 6)}}
    assert actor.load_more({layer: [1, 5]}) == {}


def test_a_checkpoint_that_has_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    own = write_sample(tmp_path / "model")
    (actor,) = actors(own, [0, 1])
    shard = shards_of(own.source.folder)[-1]
    content = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{shard.name}: has changed on disk"):
        actor.load_more({own.layers[0]: [2]})
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name}: has changed on disk"):
        actor.load_more({own.layers[0]: [2]})
    assert actor.held() == dict.fromkeys(own.layers, (0, 1))
