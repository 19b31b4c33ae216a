"""The expert bank: packed in memory, bounded cache, partial sums that add up over banks."""

import pytest
import torch

from expertmesh.actors.exchange.base import LocalExchange
from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig, load_config
from expertmesh.kernels.registry import load_kernels
from tests.support.checkpoints import write_checkpoint
from tests.support.runner import split_experts

EXPERTS = 7


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, Checkpoint]:
    folder = write_checkpoint(tmp_path_factory.mktemp("bank"), num_experts=EXPERTS)
    config = load_config(folder)
    return config, Checkpoint.open(folder, config)


def bank(
    opened: tuple[ModelConfig, Checkpoint], ids: list[int], cache_bytes: int = 1 << 30
) -> ExpertBank:
    config, source = opened
    return ExpertBank(
        config,
        load_kernels(),
        dict.fromkeys(config.moe_layers, ids),
        source,
        dtype=torch.float32,
        cache_bytes=cache_bytes,
    )


def routed(config: ModelConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    z = torch.randn(rows, config.latent_size, generator=generator)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(config.experts_per_token).indices
    return z, ids, torch.rand(ids.shape, generator=generator)


@pytest.mark.parametrize("actors", [2, 3, 7])
def test_banks_together_equal_one_bank(opened: tuple[ModelConfig, Checkpoint], actors: int) -> None:
    config, _ = opened
    layer = config.moe_layers[-1]
    z, ids, weights = routed(config, 19)
    one = LocalExchange(bank(opened, list(range(EXPERTS))))
    many = LocalExchange(*[bank(opened, part) for part in split_experts(EXPERTS, actors)])
    torch.testing.assert_close(
        many.dispatch(layer, z, ids, weights),
        one.dispatch(layer, z, ids, weights),
        atol=1e-5,
        rtol=1e-5,
    )


def test_rows_without_a_local_expert_are_zero(opened: tuple[ModelConfig, Checkpoint]) -> None:
    config, _ = opened
    layer = config.moe_layers[0]
    part = bank(opened, [6])
    z, ids, weights = routed(config, 30)
    out = part.partial_sum(layer, z, part.local_ids(layer, ids), weights)
    absent = (ids != 6).all(dim=1)
    assert absent.any()
    assert not absent.all()
    assert torch.equal(out[absent], torch.zeros_like(out[absent]))
    assert (out[~absent] != 0).any(dim=1).all()


def test_packed_memory_is_what_the_file_holds_and_the_cache_is_bounded(
    opened: tuple[ModelConfig, Checkpoint],
) -> None:
    config, _ = opened
    width, inner = config.latent_size, config.moe_intermediate_size
    elements = 3 * width * inner
    full = bank(opened, list(range(EXPERTS)))
    assert full.packed_bytes == len(config.moe_layers) * EXPERTS * (elements // 2 + elements // 32)
    bound = 3 * elements * 4  # three decoded fp32 experts
    small = bank(opened, list(range(EXPERTS)), cache_bytes=bound)
    layer = config.moe_layers[0]
    z, ids, weights = routed(config, 40)
    ids = full.local_ids(layer, ids)
    assert torch.equal(
        small.partial_sum(layer, z, ids, weights), full.partial_sum(layer, z, ids, weights)
    )
    assert 0 < small.cached_bytes <= bound
    assert full.cached_bytes == EXPERTS * elements * 4
