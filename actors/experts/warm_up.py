"""The experts' kernels called once before the first step.

A GPU's kernels are compiled when they are first called, for longer than a step may wait.
"""

import torch

from expertmesh.actors.experts.bank import ExpertBank
from expertmesh.actors.model.config import ModelConfig

# Block sizes follow the number of rows; beyond the last they stay the same.
ROWS = tuple(1 << power for power in range(3, 13))


def warm_up(bank: ExpertBank, config: ModelConfig, dtype: torch.dtype) -> None:
    """Rows of zeros without experts, in each size. dtype: of the model's activations."""
    for layer in [*bank.held()][:1]:
        for rows in ROWS:
            z_TD = torch.zeros(rows, config.latent_size, dtype=dtype, device=bank.device)
            weights_TK = torch.zeros(rows, config.experts_per_token, device=bank.device)
            bank.partial_sum(layer, z_TD, torch.full_like(weights_TK, -1).long(), weights_TK)
