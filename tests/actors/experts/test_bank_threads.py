"""Experts come and go while partial sums run, whose bits are those of a bank that never changes."""

import random
import threading
import time

import pytest
import torch

from expertmesh.actors.experts.bank import ExpertBank
from tests.actors.experts.sample import EXPERTS, Sample

STAYING, COMING = (0, 1, 2), (3, 4, 5, 6)
SERVERS, SUMS = 2, 80


class Mover(threading.Thread):
    """Adds and drops `experts` at random until told to stop."""

    def __init__(
        self,
        bank: ExpertBank,
        full: ExpertBank,
        layers: tuple[int, ...],
        experts: tuple[int, ...],
        seed: int,
    ) -> None:
        super().__init__(daemon=True)
        self._bank, self._full = bank, full
        self._layers, self._experts = layers, experts
        self._random = random.Random(seed)
        self.halt = threading.Event()
        self.moves = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.halt.is_set():
                self._move(self._random.choice(self._layers), self._random.choice(self._experts))
                self.moves += 1
                time.sleep(0)
        except BaseException as error:
            self.error = error

    def _move(self, layer: int, expert: int) -> None:
        if self._bank.holds(layer, expert):
            if self._random.random() < 0.5:
                assert self._bank.checksum(layer, expert) == self._full.checksum(layer, expert)
            self._bank.drop(layer, expert)
            return
        weights, digests = self._full.stored(layer, expert)
        if self._random.random() < 0.5:
            self._bank.add(layer, expert, weights)
        else:
            staged = self._bank.stage(layer, expert, weights)
            assert staged.digests == digests
            self._bank.admit(staged)


@pytest.mark.parametrize("cached", [0, 2, 100], ids=lambda n: f"cache of {n} experts")
def test_no_sum_changes_while_experts_come_and_go(sample: Sample, cached: int) -> None:
    limit = cached * sample.decoded_bytes
    static = sample.bank(range(EXPERTS))
    bank = sample.bank(STAYING, cache_bytes=limit)
    wanted = {
        (layer, seed): (rows := sample.rows(9, seed, STAYING), static.partial_sum(layer, *rows))
        for layer in sample.layers
        for seed in range(3)
    }
    movers = [Mover(bank, static, sample.layers, COMING[i::2], seed=i) for i in range(2)]
    wrong: list[str] = []

    def serve(seed: int) -> None:
        choose = random.Random(100 + seed)
        for _ in range(SUMS):
            layer, case = choose.choice([*wanted])
            rows, expected = wanted[layer, case]
            if not torch.equal(bank.partial_sum(layer, *rows), expected):
                wrong.append(f"layer {layer}, case {case}")
            if bank.cached_bytes > limit:
                wrong.append(f"{bank.cached_bytes} bytes cached")
            # Also those that come and go: a sum over what is here now, whatever that is.
            z, ids, weights = sample.rows(5, case)
            here = [e for e in COMING if bank.holds(layer, e)]
            try:
                masked = torch.where(torch.isin(ids, torch.tensor(here)), ids, -1)
                got = bank.partial_sum(layer, z, masked, weights)
            except LookupError:
                continue  # it went in between, and was not answered with another's numbers
            if not torch.equal(got, static.partial_sum(layer, z, masked, weights)):
                wrong.append(f"layer {layer}, experts {here}")

    servers = [threading.Thread(target=serve, args=(i,), daemon=True) for i in range(SERVERS)]
    for thread in [*movers, *servers]:
        thread.start()
    for thread in servers:
        thread.join(120)
        assert not thread.is_alive()
    for mover in movers:
        mover.halt.set()
        mover.join(10)
        assert mover.error is None
        assert mover.moves > 20
    assert not wrong

    # What is left is exactly what the books say.
    for layer, experts in bank.held().items():
        for expert in experts:
            assert bank.checksum(layer, expert) == static.checksum(layer, expert)
            if expert not in STAYING:
                bank.drop(layer, expert)
    rest = sample.bank(STAYING)
    assert bank.packed_bytes == rest.packed_bytes
    for layer in sample.layers:
        for expert in STAYING:
            bank.drop(layer, expert)
    assert (bank.packed_bytes, bank.cached_bytes, bank.count) == (0, 0, 0)
