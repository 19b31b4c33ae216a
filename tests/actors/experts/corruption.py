"""Seeded damage to one expert: in memory, in its decoded copy, or on its way."""

import math
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.experts.digests import bytes_of, stored_tensors
from expertmesh.actors.experts.transfer import Packet
from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.kernels.linear.half import HalfMatrix, to_half

Key = tuple[int, int]  # layer, expert
Damage = AbstractContextManager[None]  # undone at its end


@contextmanager
def flipped(tensor: Tensor, choose: random.Random) -> Iterator[None]:
    """One bit of the tensor's memory."""
    memory = bytes_of(tensor)
    place, bit = choose.randrange(memory.size), np.uint8(1 << choose.randrange(8))
    memory[place] ^= bit
    yield
    memory[place] ^= bit


@contextmanager
def holding(bank: ExpertBank, key: Key, weights: ExpertWeights) -> Iterator[None]:
    """The bank takes `weights` for those of `key`."""
    kept, _ = bank.stored(*key)
    bank.drop(*key)
    bank.add(*key, weights)
    yield
    bank.drop(*key)
    bank.add(*key, kept)


class Case(NamedTuple):
    """Damage the expert `key`; `other` is another one, of the same layer or not."""

    bank: ExpertBank
    key: Key
    other: Key
    choose: random.Random

    def stored(self, kind: str) -> Tensor:
        found = stored_tensors(self.bank.stored(*self.key)[0])
        return self.choose.choice([tensor for name, tensor in found if name.endswith(kind)])


def packed_bit(case: Case) -> Damage:
    return flipped(case.stored("packed"), case.choose)


def scale_bit(case: Case) -> Damage:
    return flipped(case.stored("scale"), case.choose)


@contextmanager
def copied(bank: ExpertBank, key: Key, **matrices: HalfMatrix | None) -> Iterator[None]:
    """The decoded copy of `key` has `matrices` in the place of its own."""
    kept, cache = bank.decoded(*key), bank._cache
    cache.remove(key)
    cache.put(key, replace(kept, **matrices))
    yield
    cache.remove(key)
    cache.put(key, kept)


def with_a_bit_flipped(matrix: Tensor, choose: random.Random) -> HalfMatrix:
    """One bit of a float16 number, so that it is another finite number."""
    halves = matrix.half().contiguous()
    bits, values = halves.view(torch.int16).view(-1).numpy(), halves.view(-1)
    while True:
        place, bit = (
            choose.randrange(bits.size),
            np.uint16(1 << choose.randrange(16)).view(np.int16),
        )
        before = float(values[place])
        bits[place] ^= bit
        after = float(values[place])
        if math.isfinite(after) and after != before:
            made = to_half(halves.float())
            assert made is not None
            return made
        bits[place] ^= bit


def derived_bit(case: Case) -> Damage:
    name, at = case.choose.choice([("w13", 0), ("w2", 1)])
    wrong = with_a_bit_flipped(case.bank.weights(*case.key)[at], case.choose)
    return copied(case.bank, case.key, **{name: wrong})


def derived_of_another(case: Case) -> Damage:
    name = case.choose.choice(["w13", "w2"])
    other = getattr(case.bank.decoded(*case.other), name)
    return copied(case.bank, case.key, **{name: other})


def stale_scale(case: Case) -> Damage:
    weights, other = (case.bank.stored(*key)[0] for key in (case.key, case.other))
    name = case.choose.choice(["w1", "w2", "w3"])
    mixed = PackedMatrix(getattr(weights, name).packed, getattr(other, name).scale)
    return holding(case.bank, case.key, replace(weights, **{name: mixed}))


def another_expert(case: Case) -> Damage:
    return holding(case.bank, case.key, case.bank.stored(*case.other)[0])


def exchanged_matrices(case: Case) -> Damage:
    """Gate and up have one shape."""
    weights, _ = case.bank.stored(*case.key)
    return holding(case.bank, case.key, replace(weights, w1=weights.w3, w3=weights.w1))


IN_MEMORY = {
    kind.__name__: kind
    for kind in (
        packed_bit, scale_bit, derived_bit, derived_of_another, stale_scale, another_expert,
        exchanged_matrices,
    )
}  # fmt: skip


def damaged(packet: Packet, other: Packet, choose: random.Random) -> tuple[str, Packet]:
    """What `packet` may become on its way, and the name of the damage."""
    kind = choose.choice(["bit", "tensor of another", "other digests", "order", "shape"])
    at = choose.randrange(len(packet.parts))
    parts = list(packet.parts)
    if kind == "bit":
        data = parts[at].data.copy()
        data[choose.randrange(data.size)] ^= np.uint8(1 << choose.randrange(8))
        parts[at] = parts[at]._replace(data=data)
    elif kind == "tensor of another":
        parts[at] = other.parts[at]
    elif kind == "order":  # of the gate and up matrices, with their scales
        parts = [parts[i]._replace(data=parts[j].data) for i, j in enumerate((4, 5, 2, 3, 0, 1))]
    elif kind == "shape":
        rows, columns = parts[at].shape
        parts[at] = parts[at]._replace(shape=(rows * 2, columns // 2))
    digests = packet.digests
    if kind == "other digests":
        place = choose.randrange(2)
        digests = digests._replace(**{digests._fields[place]: other.digests[place]})
    return kind, Packet(packet.layer, packet.expert, tuple(parts), digests)
