"""Every damage to an expert shows in its checksum, and none reaches a bank by a transfer."""

import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from expertmesh.actors.exchange.settings import ExchangeSettings
from expertmesh.actors.experts import bank as bank_module
from expertmesh.actors.experts import decoded, transfer
from expertmesh.actors.experts.actor import ExpertActor
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.experts.decoded import Decoded
from expertmesh.actors.experts.transfer import ChecksumError, Packet, TransferError
from expertmesh.actors.model.checkpoint import CheckpointError, ExpertWeights
from expertmesh.actors.model.loading import LoadSettings
from expertmesh.kernels.linear import half
from tests.actors.experts.corruption import (
    IN_MEMORY,
    Case,
    copied,
    damaged,
    flipped,
    with_a_bit_flipped,
)
from tests.actors.experts.sample import EXPERTS, Sample

CORRUPTIONS = 10_000
ON_THE_WAY = 2_000


class Sender:
    """A peer that sends what it is told to."""

    name = "expert-9"

    def __init__(self) -> None:
        self.packet: Packet | None = None

    def give(self, layer: int, expert: int, timeout_s: float) -> Packet:
        assert self.packet is not None
        return self.packet


def test_all_of_ten_thousand_corruptions_are_found(sample: Sample) -> None:
    choose = random.Random(20)
    bank = sample.bank(range(EXPERTS))
    keys = [(layer, expert) for layer in sample.layers for expert in range(EXPERTS)]
    good = {key: bank.checksum(*key) for key in keys}
    assert len(set(good.values())) == len(keys)
    done: Counter[str] = Counter()
    missed = []
    for n in range(CORRUPTIONS):
        key, other = choose.sample(keys, 2)
        kind = choose.choice([*IN_MEMORY])
        with IN_MEMORY[kind](Case(bank, key, other, choose)):
            if bank.checksum(*key) == good[key]:
                missed.append((n, kind, key, other))
        done[kind] += 1
    assert not missed
    assert len(done) == len(IN_MEMORY)
    assert min(done.values()) > 1000
    assert {key: bank.checksum(*key) for key in keys} == good, "each damage was undone"


def test_a_checksum_is_the_same_on_every_actor_and_whatever_is_cached(sample: Sample) -> None:
    banks = [sample.bank(range(EXPERTS)), sample.bank([1, 4], cache_bytes=0), sample.bank([4])]
    for layer in sample.layers:
        banks[2].weights(layer, 4)
        assert len({bank.checksum(layer, 4) for bank in banks}) == 1
    assert banks[2].cached_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_is_the_same_on_every_processor(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def checksum() -> int:
        bank = sample.bank([3], dtype=dtype)
        return bank.checksum(sample.layers[0], 3)

    monkeypatch.setattr(half, "native_bf16", lambda: False)
    kept_in_float16 = checksum()
    monkeypatch.setattr(decoded, "to_half", lambda _: None)
    assert checksum() == kept_in_float16


def test_nothing_damaged_on_the_way_enters_a_bank(sample: Sample) -> None:
    choose = random.Random(21)
    full, target = sample.bank(range(EXPERTS)), sample.bank([0])
    before = target.held(), target.packed_bytes, target.cached_bytes
    sender, done = Sender(), Counter[str]()
    for _ in range(ON_THE_WAY):
        layer, elsewhere = choose.choice(sample.layers), choose.choice(sample.layers)
        expert, other = choose.sample(range(1, EXPERTS), 2)
        packet, theirs = (transfer.give(full, *k) for k in ((layer, expert), (elsewhere, other)))
        kind, sender.packet = damaged(packet, theirs, choose)
        done[kind] += 1
        with pytest.raises(TransferError) as caught:
            adopt(target, layer, expert, sender)
        error = caught.value
        assert (error.layer, error.expert, error.source) == (layer, expert, "expert-9")
    assert len(done) == 5
    assert (target.held(), target.packed_bytes, target.cached_bytes) == before
    sender.packet = transfer.give(full, layer, expert)
    assert adopt(target, layer, expert, sender) == full.checksum(layer, expert)


def test_a_mismatch_is_counted_apart(sample: Sample) -> None:
    load = LoadSettings(model=sample.source.folder, device="cpu")
    source, target, sender = sample.bank([3]), ExpertActor(load, ExchangeSettings()), Sender()
    target.load(dict.fromkeys(sample.layers, (0,)))
    layer = sample.layers[0]
    packet = transfer.give(source, layer, 3)
    sender.packet = replace(packet, digests=packet.digests._replace(derived=1))
    with pytest.raises(ChecksumError, match="checksum mismatch"):
        target.adopt(layer, 3, sender, 10.0)
    stats = target.stats()
    assert (stats.transfer_failures, stats.checksum_failures, stats.transfers_in) == (1, 1, 0)


def test_a_source_whose_memory_went_bad_is_found_by_the_receiver(sample: Sample) -> None:
    source, target, sender = sample.bank(range(EXPERTS)), sample.bank([0]), Sender()
    layer, choose = sample.layers[0], random.Random(22)
    weights, _ = source.stored(layer, 3)
    with flipped(weights.w2.scale, choose):
        sender.packet = transfer.give(source, layer, 3)
        with pytest.raises(TransferError, match="mismatch in its stored bytes"):
            adopt(target, layer, 3, sender)
    assert not target.holds(layer, 3)
    assert adopt(target, layer, 3, sender)


def test_a_bad_decode_is_found_although_the_stored_bytes_are_right(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, sender = sample.bank(range(EXPERTS)), sample.bank([0]), Sender()
    layer = sample.layers[0]
    sender.packet = transfer.give(source, layer, 3)
    original = bank_module.decode

    def decode(*args: object) -> Decoded:
        made = original(*args)
        w13 = made.dense()[0].contiguous()
        swapped = w13.as_strided(w13.shape, (1, w13.shape[0]))  # right bytes, another layout
        return Decoded(swapped, made.w2)

    monkeypatch.setattr(bank_module, "decode", decode)
    with pytest.raises(TransferError, match="mismatch in its decoded matrices"):
        adopt(target, layer, 3, sender)
    monkeypatch.undo()
    assert adopt(target, layer, 3, sender)


def test_an_expert_that_is_here_already_is_verified_in_place(sample: Sample) -> None:
    bank, layer, choose = sample.bank([0, 1]), sample.layers[0], random.Random(1)
    sender = Sender()  # is not asked
    assert adopt(bank, layer, 1, sender) == bank.checksum(layer, 1)
    with (
        copied(bank, (layer, 1), w13=with_a_bit_flipped(bank.weights(layer, 1)[0], choose)),
        pytest.raises(TransferError, match=r"held here already, .* in its decoded matrices"),
    ):
        adopt(bank, layer, 1, sender)


def test_a_load_that_arrives_damaged_is_refused(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, layer = sample.bank([0]), sample.layers[0]
    original, seen = bank_module._own, []

    def own(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
        copy = original(weights, device)
        seen.append(copy)
        if len(seen) == 3:
            copy.w3.packed[0, 0] ^= 4
        return copy

    monkeypatch.setattr(bank_module, "_own", own)
    with pytest.raises(CheckpointError, match=f"layer {layer}: expert 3 was damaged"):
        bank.load({layer: [1, 2, 3, 4]}, sample.source)
    assert bank.held() == dict.fromkeys(sample.layers, (0,))


def adopt(bank: ExpertBank, layer: int, expert: int, peer: transfer.Peer) -> int:
    return transfer.adopt(bank, layer, expert, peer, time.monotonic() + 10).checksum
