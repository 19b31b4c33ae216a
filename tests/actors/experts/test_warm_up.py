"""The experts' kernels exist before the first step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertmesh.actors.experts.warm_up import ROWS, warm_up
from expertmesh.kernels.latent_moe.triton_experts import MOST_TOKENS, block_rows
from tests.actors.experts.sample import Sample


def test_every_block_size_is_met() -> None:
    """For K3's experts and for few."""
    for experts, top_k in [(896, 16), (7, 2), (256, 8)]:
        table: Any = SimpleNamespace(slots_E=torch.empty(experts))
        sizes = {block_rows(rows, top_k, table, torch.bfloat16) for rows in ROWS}
        for rows in range(1, MOST_TOKENS + 1):
            assert block_rows(rows, top_k, table, torch.bfloat16) in sizes


def test_rows_without_experts(sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = sample.bank([2])
    computed = bank.partial_sum
    seen: list[tuple[int, ...]] = []

    def partial_sum(layer: int, z_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        sums = computed(layer, z_TD, ids_TK, weights_TK)
        assert layer in sample.layers and not sums.any()
        seen.append(tuple(ids_TK.shape))
        return sums

    monkeypatch.setattr(bank, "partial_sum", partial_sum)
    warm_up(bank, sample.config, torch.float32)
    assert seen == [(rows, sample.config.experts_per_token) for rows in ROWS]
    warm_up(sample.bank([]), sample.config, torch.float32)
