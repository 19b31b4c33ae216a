"""The expert bank: packed in memory, bounded cache, partial sums that add up over banks."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts import bank as bank_module
from expertmesh.actors.experts.bank import ExpertNotHeld
from tests.actors.experts.sample import EXPERTS, Sample
from tests.support.runner import split_experts

ALL = range(EXPERTS)


@pytest.mark.parametrize(
    "parts",
    [*(split_experts(EXPERTS, actors) for actors in (2, 3, 7)), [[6, 0, 3], [2], [5, 1, 4], []]],
    ids=str,
)
def test_banks_together_give_the_bits_of_one_bank(
    sample: Sample, parts: Sequence[Sequence[int]]
) -> None:
    one = LocalExchange(sample.bank(ALL))
    many = LocalExchange(*[sample.bank(part) for part in parts])
    for layer in sample.layers:
        rows = sample.rows(53, seed=layer)
        whole = one.combine(one.dispatch(layer, *rows))
        assert whole.dtype == torch.float32
        assert torch.equal(many.combine(many.dispatch(layer, *rows)), whole)


def test_rows_without_a_local_expert_are_zero(sample: Sample) -> None:
    layer, part = sample.layers[0], sample.bank([6])
    z, ids, weights = sample.rows(30)
    out = part.partial_sum(layer, z, part.local_ids(layer, ids), weights)
    assert out.dtype == part.sum_dtype == torch.float64
    absent = (ids != 6).all(dim=1)
    assert absent.any()
    assert not absent.all()
    assert torch.equal(out[absent], torch.zeros_like(out[absent]))
    assert (out[~absent] != 0).any(dim=1).all()


def test_packed_memory_is_what_the_file_holds_and_the_cache_is_bounded(sample: Sample) -> None:
    elements = sample.decoded_bytes // 2
    full = sample.bank(ALL)
    assert full.packed_bytes == len(sample.layers) * EXPERTS * (elements // 2 + elements // 32)
    assert full.count == len(sample.layers) * EXPERTS
    bound = 3 * sample.decoded_bytes
    small = sample.bank(ALL, cache_bytes=bound)
    layer, rows = sample.layers[0], sample.rows(40)
    assert torch.equal(small.partial_sum(layer, *rows), full.partial_sum(layer, *rows))
    assert 0 < small.cached_bytes <= bound
    assert full.cached_bytes == EXPERTS * sample.decoded_bytes


def test_an_expert_that_is_not_held_is_an_error_with_its_name(sample: Sample) -> None:
    layer, part = sample.layers[1], sample.bank([0, 1, 2, 3])
    z, ids, weights = sample.rows(20)
    with pytest.raises(ExpertNotHeld, match=rf"^layer {layer}: expert [456] is not held here$"):
        part.partial_sum(layer, z, ids, weights)
    with pytest.raises(ExpertNotHeld, match="layer 0: expert 2 "):  # a layer without experts
        part.weights(0, 2)


def test_ids_of_absent_experts_become_minus_one(sample: Sample) -> None:
    layer, part = sample.layers[0], sample.bank([5, 2])
    ids = torch.tensor([[5, 6], [-1, 2], [0, -1]])
    wanted = torch.tensor([[5, -1], [-1, 2], [-1, -1]])
    assert torch.equal(part.local_ids(layer, ids), wanted)
    part.drop(layer, 5)
    assert part.local_ids(layer, ids).tolist() == [[-1, -1], [-1, 2], [-1, -1]]
    assert torch.equal(part.local_ids(0, ids), torch.full_like(ids, -1))


def test_what_is_dropped_is_gone_and_what_is_added_is_there(sample: Sample) -> None:
    layer, other = sample.layers[0], sample.layers[1]
    full, part = sample.bank(ALL), sample.bank([0, 1, 2])
    before, checksum = part.packed_bytes, part.checksum(layer, 1)
    part.weights(layer, 1)
    assert part.cached_bytes == sample.decoded_bytes
    kept, _ = part.stored(layer, 1)
    part.drop(layer, 1)
    assert part.cached_bytes == 0, "its decoded copy went with it"
    assert part.packed_bytes == before - kept.nbytes
    assert not part.holds(layer, 1)
    assert part.held() == {**dict.fromkeys(sample.layers, (0, 1, 2)), layer: (0, 2)}
    with pytest.raises(ExpertNotHeld):
        part.drop(layer, 1)
    for absent in (part.weights, part.checksum, part.stored):
        with pytest.raises(ExpertNotHeld):
            absent(layer, 1)

    part.add(layer, 1, kept)
    assert part.packed_bytes == before
    assert part.checksum(layer, 1) == checksum == full.checksum(layer, 1)
    with pytest.raises(ValueError, match=f"layer {layer}: expert 1 is held already"):
        part.add(layer, 1, kept)
    assert part.packed_bytes == before
    with pytest.raises(ValueError, match="held already"):
        part.load({other: [4], layer: [5, 2]}, sample.source)
    assert part.held() == dict.fromkeys(sample.layers, (0, 1, 2)), "all or none"
    assert part.packed_bytes == before


def test_a_decoded_copy_does_not_outlive_a_drop_in_the_middle_of_its_making(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, part = sample.layers[0], sample.bank([3, 4])
    original = bank_module.decode

    def decode(*args: Any) -> Any:
        made = original(*args)
        part.drop(layer, 3)
        return made

    monkeypatch.setattr(bank_module, "decode", decode)
    w13, w2 = part.weights(layer, 3)
    assert w13.isfinite().all()
    assert w2.isfinite().all()
    assert part.cached_bytes == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_memory_changes_no_bit(
    sample: Sample, monkeypatch: pytest.MonkeyPatch, poison: float
) -> None:
    """Rows of a grouped product that nothing has written must not reach a sum, not even as 0 x."""
    cases = [(layer, sample.rows(rows)) for layer in sample.layers for rows in (1, 2, 3, 5, 17)]
    part = sample.bank([0, 2, 4, 6])

    def sums() -> list[torch.Tensor]:
        return [
            part.partial_sum(layer, z, part.local_ids(layer, ids), weights)
            for layer, (z, ids, weights) in cases
        ]

    clean = sums()
    poisoned = []

    def filled(make: Any) -> Any:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            made: torch.Tensor = make(*args, **options)
            poisoned.append(made.shape)
            return made.fill_(poison) if made.is_floating_point() else made

        return call

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))
    again = sums()
    assert poisoned
    for one, two in zip(clean, again, strict=True):
        assert torch.equal(one, two)
