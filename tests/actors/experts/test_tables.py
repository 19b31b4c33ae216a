"""Experts as kernels find them: by address, in memory that stays while a step may read it."""

import random
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.actors.experts import tables
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.experts.tables import LayerTables
from expertmesh.actors.model.checkpoint import ExpertWeights, PackedMatrix
from expertmesh.kernels.latent_moe.tables import ExpertTable
from expertmesh.kernels.registry import load_kernels
from tests.actors.experts.sample import EXPERTS, ROOMY, Sample, write_sample
from tests.support.checkpoints import Experts

KERNELS = load_kernels("torch,experts_partial_sum=triton")


def triton_bank(sample: Sample, ids: Sequence[int]) -> ExpertBank:
    placed = dict.fromkeys(sample.layers, ids)
    return ExpertBank(
        sample.config, KERNELS, placed, sample.source, dtype=torch.float32, cache_bytes=ROOMY
    )


def assert_same(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype == torch.float64
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", ["packed", "bf16", "mixed"])
def test_kernels_read_experts_as_they_are_stored(tmp_path: Path, stored: Experts) -> None:
    sample = write_sample(tmp_path, stored)
    layer, rows = sample.layers[0], sample.rows(4)
    part = triton_bank(sample, range(EXPERTS))
    assert_same(
        part.partial_sum(layer, *rows), sample.bank(range(EXPERTS)).partial_sum(layer, *rows)
    )
    assert part.cached_bytes == 0
    assert len(part.table(layer).forms) == (2 if stored == "mixed" else 1)


def test_an_expert_of_several_forms_is_decoded(sample: Sample) -> None:
    layer, part = sample.layers[0], triton_bank(sample, [2])
    whole, _ = sample.bank(range(EXPERTS)).stored(layer, 4)
    assert isinstance(whole.w2, PackedMatrix)
    dense = KERNELS.mxfp4_decode(whole.w2.packed, whole.w2.scale, torch.bfloat16)
    part.add(layer, 4, ExpertWeights(whole.w1, dense, whole.w3))
    z, ids, weights = sample.rows(3, among=[2, 4])
    assert_same(
        part.partial_sum(layer, z, ids, weights),
        sample.bank([2, 4]).partial_sum(layer, z, ids, weights),
    )


def test_a_table_lasts_until_an_expert_comes_or_goes(sample: Sample) -> None:
    layer, other = sample.layers[:2]
    part = triton_bank(sample, [0, 3, 5])
    first, elsewhere = part.table(layer), part.table(other)
    assert part.table(layer) is first
    assert first.slots_E.tolist() == [0, -1, -1, 1, -1, 2, -1]
    part.drop(layer, 3)
    second = part.table(layer)
    assert second.slots_E.tolist() == [0, -1, -1, -1, -1, 1, -1] and second.held == 2
    assert first.slots_E.tolist() == [0, -1, -1, 1, -1, 2, -1], "whoever has it sees it whole"
    part.load({layer: [6]}, sample.source)
    assert part.table(layer).held == 3 and part.table(other) is elsewhere
    assert part.table(0).held == 0, "a layer without experts"


def test_dropped_experts_stay_in_memory_while_a_table_has_them(sample: Sample) -> None:
    layer, part = sample.layers[0], triton_bank(sample, [1, 4])
    rows = sample.rows(3, among=[1, 4])
    before = part.partial_sum(layer, *rows)
    kept = [part.table(layer)]
    packed = part.stored(layer, 4)[0].w2
    assert isinstance(packed, PackedMatrix)
    memory = weakref.ref(packed.packed)
    del packed
    part.drop(layer, 4)

    class Step:
        def __call__(self, expert: int) -> tuple[Tensor, Tensor]:
            raise AssertionError("kernels read the table")

        def table(self) -> ExpertTable:
            return kept[0]

    glu = part._glu
    again = KERNELS.experts_partial_sum(*rows, Step(), glu, sum_dtype=torch.float64)
    assert torch.equal(again, before)
    assert memory() is not None
    kept.clear()
    assert memory() is None
    gone = part.partial_sum(layer, *rows)
    assert torch.equal(gone.isnan().all(1), (rows[1] == 4).any(1)), "not another expert's numbers"


def test_who_reads_tables_keeps_no_decoded_copies_of_moved_experts(sample: Sample) -> None:
    layer, part = sample.layers[0], triton_bank(sample, [0])
    part.table(layer)
    weights, _ = sample.bank([5]).stored(layer, 5)
    part.admit(part.stage(layer, 5, weights))
    assert part.holds(layer, 5) and part.cached_bytes == 0


def test_no_sum_changes_while_experts_come_and_go(sample: Sample) -> None:
    layer, part = sample.layers[0], triton_bank(sample, [0, 1, 2])
    coming = {expert: sample.bank([expert]).stored(layer, expert)[0] for expert in (3, 4, 5)}
    rows = sample.rows(3, among=[0, 1, 2])
    expected = part.partial_sum(layer, *rows)
    halt, moves = threading.Event(), 0

    def move() -> None:
        nonlocal moves
        choose = random.Random(1)
        while not halt.wait(0.002):
            expert = choose.choice([*coming])
            if part.holds(layer, expert):
                part.drop(layer, expert)
            else:
                clone = {
                    name: PackedMatrix(matrix.packed.clone(), matrix.scale.clone())
                    for name in ("w1", "w2", "w3")
                    if isinstance(matrix := getattr(coming[expert], name), PackedMatrix)
                }
                part.add(layer, expert, ExpertWeights(**clone))
            moves += 1

    mover = threading.Thread(target=move, daemon=True)
    mover.start()
    try:
        sums = 0
        while sums < 3 or moves < 8:
            assert torch.equal(part.partial_sum(layer, *rows), expected)
            sums += 1
    finally:
        halt.set()
        mover.join(10)


def test_the_allocator_hears_of_every_stream_that_reads_a_table(
    sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []
    stream = "first"
    made = ExpertTable(torch.zeros(7), torch.zeros(1, 7), (1,), 8, (torch.zeros(1), torch.ones(1)))
    monkeypatch.setattr(tables, "expert_table", lambda *args: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, at: told.append((id(self), at)))
    layers = LayerTables(
        KERNELS, experts=7, inner=8, dtype=torch.float32, device=torch.device("cuda")
    )

    def heard() -> Any:
        found, told[:] = {one for one, _ in told}, []
        return found

    everything = {id(one) for one in (made.slots_E, made.rows, *made.tensors)}
    layers.make(1, [])
    assert heard() == everything
    layers.get(1)
    assert heard() == set()
    stream = "second"
    layers.get(1)
    assert heard() == everything
    layers.forget(1)
    assert layers.get(1) is None and not layers.in_use
    layers.make(1, [])
    assert heard() == everything, "a new table has new experts in it"
