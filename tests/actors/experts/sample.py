"""A small checkpoint, banks over it, and rows to route through them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig, load_config
from expertmesh.kernels.registry import load_kernels
from tests.support.checkpoints import Experts, write_checkpoint

EXPERTS = 7
ROOMY = 1 << 30


class Sample(NamedTuple):
    config: ModelConfig
    source: Checkpoint

    @property
    def layers(self) -> tuple[int, ...]:
        return self.config.moe_layers

    @property
    def decoded_bytes(self) -> int:
        """Of one expert as it is cached: two bytes a number, which is exact."""
        return 3 * self.config.latent_size * self.config.moe_intermediate_size * 2

    def bank(
        self,
        ids: Sequence[int],
        cache_bytes: int = ROOMY,
        dtype: torch.dtype = torch.float32,
    ) -> ExpertBank:
        placed = dict.fromkeys(self.layers, ids)
        return ExpertBank(
            self.config, load_kernels(), placed, self.source,
            dtype=dtype, cache_bytes=cache_bytes,
        )  # fmt: skip

    def rows(
        self, count: int, seed: int = 0, among: Sequence[int] = tuple(range(EXPERTS))
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [T, D], distinct expert ids [T, K] out of `among`, router weights [T, K]."""
        generator = torch.Generator().manual_seed(1000 * seed + count)
        top_k = self.config.experts_per_token
        z_TD = torch.randn(count, self.config.latent_size, generator=generator)
        picks = torch.rand(count, len(among), generator=generator).topk(top_k).indices
        return z_TD, torch.tensor(among)[picks], torch.rand(count, top_k, generator=generator)


def write_sample(folder: Path, experts: Experts = "packed") -> Sample:
    write_checkpoint(folder, num_experts=EXPERTS, experts=experts)
    config = load_config(folder)
    return Sample(config, Checkpoint.open(folder, config))
