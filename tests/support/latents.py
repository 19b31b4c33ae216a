"""Cached rows and queries like those of attention, without a model."""

import torch
from torch import Tensor

WIDTH, RANK, HEADS, SCALE = 40, 32, 3, 0.2


def correlated(pages: int, seed: int = 0) -> Tensor:
    """Rows whose variances fall from 1 to 1e-3, in mixed directions, off the origin."""
    draw = torch.Generator().manual_seed(seed)
    mix, _ = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(9)))
    shrink = torch.logspace(0, -1.5, WIDTH)
    return torch.randn(pages * 64, WIDTH, generator=draw) * shrink @ mix + 0.3


def queries(count: int, seed: int = 1) -> Tensor:
    """In a few directions, which are not those of the largest variances."""
    draw = torch.Generator().manual_seed(seed)
    span = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(8))
    return torch.randn(count, 6, generator=draw) @ span


def moment() -> Tensor:
    q = queries(4000, seed=5).double()
    return q.T @ q / len(q)
